// SPDX-License-Identifier: Apache-2.0

package headgate.relay;

import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.attribute.PosixFileAttributes;
import java.nio.file.attribute.PosixFilePermission;
import java.security.GeneralSecurityException;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import javax.crypto.Mac;
import javax.crypto.spec.SecretKeySpec;
import org.apache.spark.SparkConf;
import org.apache.spark.SparkContext;
import org.apache.spark.SparkContext$;
import org.apache.spark.scheduler.SparkListener;
import org.apache.spark.scheduler.SparkListenerEvent;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Opens relays for the clients of a Spark Connect server whose operator has installed this jar:
 *   spark.extraListeners             headgate.relay.InstalledRelays
 *   spark.headgate.relay.secretFile  a file with one secret of 32 bytes in each line, in hexadecimal digits
 * A server whose file is missing, invalid or accessible to others does not start.
 *
 * A client asks for its relay with the tag of a small operation:
 *   headgate.open.TEXT.PROOF
 * in hexadecimal digits, where TEXT means the words
 *   IDENTITY LEASE_MS CERTIFICATE HOST PORT SESSION
 * and PROOF is their digest with the key of this identity, which one of the file's secrets gives. Tags are public, in
 * the server's UI and event log; so nothing in them is secret, and none opens a second relay, or one for another
 * session than that of the small operation. The relay then dials the client.
 *
 * Whose operation it is comes from Spark Connect's own event. The properties of a job do not say it: Spark copies the
 * settings of a session into them, so a client that sets spark.job.tags writes there what it likes.
 */
public final class InstalledRelays extends SparkListener {

    private static final Logger log = LoggerFactory.getLogger(InstalledRelays.class);
    private static final String SECRET_FILE = "spark.headgate.relay.secretFile";
    private static final String MARK = "headgate.open.";
    private static final int SECRET_BYTES_MIN = 16;
    private static final int TEXT_CHARS_MAX = 4096;
    private static final int REMEMBERED_MAX = 100_000;

    private final List<byte[]> extracted = new ArrayList<>(); // see protocol/wire/keys.py
    private final Set<String> opened = new LinkedHashSet<>();

    /** Spark makes it with the server's context. */
    public InstalledRelays(SparkConf conf) throws Exception {
        if (!conf.contains(SECRET_FILE)) {
            throw new IllegalArgumentException("set " + SECRET_FILE + " to the file that holds the clients' secrets");
        }
        Path file = Path.of(conf.get(SECRET_FILE));
        check(file);
        for (String line : Files.readAllLines(file)) {
            if (!line.isBlank()) {
                extracted.add(mac("headgate keys 1".getBytes(StandardCharsets.US_ASCII), secret(file, line.strip())));
            }
        }
        if (extracted.isEmpty()) {
            throw new IOException(file + " holds no secret: see the page about Spark Connect in Headgate's documentation");
        }
        log.info("Headgate serves Spark Connect clients; secrets: {}", extracted.size());
    }

    /** As the sidecar checks its own file: no other user may read it or change it. */
    private static void check(Path file) throws IOException {
        PosixFileAttributes attributes = Files.readAttributes(file, PosixFileAttributes.class);
        String owner = attributes.owner().getName();
        if (!owner.equals(System.getProperty("user.name")) && !owner.equals("root")) {
            throw new IOException(file + " belongs to another user (" + owner + "): use a copy that belongs to you");
        }
        for (PosixFilePermission permission : attributes.permissions()) {
            if (!permission.name().startsWith("OWNER_")) {
                throw new IOException(file + " is accessible to other users: run chmod 600 " + file);
            }
        }
    }

    private static byte[] secret(Path file, String line) throws IOException {
        try {
            byte[] secret = HexFormat.of().parseHex(line);
            if (secret.length >= SECRET_BYTES_MIN) {
                return secret;
            }
        } catch (IllegalArgumentException invalid) {
            // its text would show the line
        }
        throw new IOException(file + " has a line that is not a secret: " + SECRET_BYTES_MIN + " or more random bytes "
                + "in hexadecimal digits are expected");
    }

    @Override
    public void onOtherEvent(SparkListenerEvent event) {
        Map<String, Object> started = SessionRelay.fieldsOf(event, "SparkListenerConnectOperationStarted");
        if (!(started.get("sparkSessionTags") instanceof scala.collection.Iterable<?> tags)) {
            return;
        }
        scala.collection.Iterator<?> each = tags.iterator();
        while (each.hasNext()) {
            String tag = String.valueOf(each.next());
            if (tag.startsWith(MARK)) {
                try {
                    open(tag.substring(MARK.length()), (String) started.get("userId"), (String) started.get("sessionId"));
                } catch (Exception failure) {
                    log.warn("Headgate refused to open a relay: {}", String.valueOf(failure));
                }
            }
        }
    }

    private void open(String asked, String user, String session) throws Exception {
        String[] parts = asked.split("\\.");
        if (parts.length != 2 || parts[0].length() > TEXT_CHARS_MAX) {
            throw new IOException("the request is malformed");
        }
        byte[] text = HexFormat.of().parseHex(parts[0]);
        String[] words = new String(text, StandardCharsets.UTF_8).split(" ");
        if (words.length != 6) {
            throw new IOException("the request is malformed: use the same release of Headgate on server and client");
        }
        byte[] key = keyOf(HexFormat.of().parseHex(words[0]), text, HexFormat.of().parseHex(parts[1]));
        if (!words[5].equals(session)) {
            throw new IOException("the request is that of another session");
        }
        if (!opened.add(words[0])) {
            return; // the tag is public: somebody says it again
        }
        if (opened.size() > REMEMBERED_MAX) {
            opened.remove(opened.iterator().next());
        }
        ByteArrayOutputStream credentials = new ByteArrayOutputStream();
        credentials.write(HexFormat.of().parseHex(words[0]));
        credentials.write(key);
        credentials.write(words[2].equals("-") ? new byte[0] : HexFormat.of().parseHex(words[2]));
        SparkContext context = SparkContext$.MODULE$.getActive().get();
        SessionRelay relay = new SessionRelay(SessionRelay.origin(user, session), Long.parseLong(words[1]));
        relay.begin(context, words[3], Integer.parseInt(words[4]), credentials.toByteArray());
        log.info("Headgate opened a relay to {}:{}", words[3], words[4]);
    }

    /** The key of the relay's connection, from the secret with which the request was proved. */
    private byte[] keyOf(byte[] identity, byte[] text, byte[] proof) throws IOException, GeneralSecurityException {
        for (byte[] one : extracted) {
            byte[] key = mac(one, "relay\0".getBytes(StandardCharsets.US_ASCII), identity, new byte[] {1});
            byte[] expected = mac(key, "headgate-open".getBytes(StandardCharsets.US_ASCII), text);
            if (MessageDigest.isEqual(expected, proof)) {
                return key;
            }
        }
        throw new IOException("the client's secret is not in the file of " + SECRET_FILE);
    }

    private static byte[] mac(byte[] key, byte[]... parts) throws GeneralSecurityException {
        Mac mac = Mac.getInstance("HmacSHA256");
        mac.init(new SecretKeySpec(key, "HmacSHA256"));
        for (byte[] part : parts) {
            mac.update(part);
        }
        return mac.doFinal();
    }
}
