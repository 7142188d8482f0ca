# SPDX-License-Identifier: Apache-2.0
# What the scripts of programs that tests start have in common: print the program's path, or get it installed.
#
# It is sourced, with these set: `what` and `variable` (the environment variable with a path of the user's), `programs` (the
# names on the PATH, the best first), `places` (paths elsewhere, one a line, with shell patterns), and the packages that have
# it: `debian`, `fedora`, `alpine`, `brew`.
#
# Looked at in this order: the variable, the PATH, the places. With none, root on a Debian-like machine gets it installed;
# anybody else gets one line on stderr that says how, and a non-zero exit status. stdout carries the path and nothing else.
# A variable that is set and empty says that it was looked for and not found: nothing is installed then.

try() {
    if [ -f "$1" ] && [ -x "$1" ]; then
        printf '%s\n' "$1"
        exit 0
    fi
}

look() {
    [ -z "$chosen" ] || try "$chosen"
    for name in $programs; do
        on_path=$(command -v "$name" 2>/dev/null) && try "$on_path"
    done
    # Only lines separate places: macOS has them in folders with spaces. Patterns are expanded.
    IFS='
'
    for place in ${places-}; do
        try "$place"
    done
    IFS=$separators
}

separators=$IFS
eval "chosen=\${$variable-} looked_for=\${$variable+yes}"
look

if command -v apt-get >/dev/null 2>&1; then
    if [ "$(id -u)" = 0 ] && { [ -n "$chosen" ] || [ -z "$looked_for" ]; }; then
        echo "headgate: installing $what with apt-get (a minute or so)" >&2
        log=$(mktemp)
        # The tests start their own servers: a package need not start one.
        if apt-get update >>"$log" 2>&1 </dev/null &&
            RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $debian \
                >>"$log" 2>&1 </dev/null; then
            rm -f "$log"
            look
        fi
        [ ! -f "$log" ] || { tail -n 3 "$log" >&2; rm -f "$log"; }
    fi
    way="sudo apt-get install $debian"
elif command -v dnf >/dev/null 2>&1; then
    way="sudo dnf install $fedora"
elif command -v apk >/dev/null 2>&1; then
    way="apk add $alpine"
elif command -v brew >/dev/null 2>&1; then
    way="brew install $brew"
else
    way="install it and set $variable to its path"
fi
echo "headgate: tests need $what, and none was found. To get it: $way" >&2
exit 1
