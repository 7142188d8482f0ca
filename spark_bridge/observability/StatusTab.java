// SPDX-License-Identifier: Apache-2.0

package headgate.observability;

import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.io.OutputStream;
import java.lang.reflect.Method;
import java.util.HashSet;
import java.util.Set;
import java.util.zip.GZIPInputStream;

import jakarta.servlet.http.HttpServlet;
import jakarta.servlet.http.HttpServletRequest;
import jakarta.servlet.http.HttpServletResponse;

import org.apache.spark.SparkContext;
import org.apache.spark.ui.SparkUI;
import org.apache.spark.ui.SparkUITab;
import org.apache.spark.ui.UIUtils;
import org.apache.spark.ui.WebUIPage;
import org.apache.spark.ui.WebUITab;
import scala.collection.immutable.Seq;

/**
 * A tab in Spark's UI. The sidecar hands over the page's files once and its status as JSON whenever somebody looks;
 * this class only serves them. Compiled by Janino inside the driver's JVM, so this is old Java: no lambdas, no inferred
 * generics, no try-with-resources.
 *
 * Spark's own filters stand in front of what is attached here: its access lists, its headers, its content security
 * policy. Jetty's threads call doGet; the sidecar calls the other methods.
 */
public final class StatusTab extends HttpServlet {

    private static final long FRESH_NANOS = 10000000000L;
    private static final String PREFIX = "headgate";

    private SparkUI ui;
    private Tab tab;
    private String files;
    private byte[] script;
    private byte[] style;
    private volatile byte[] status;
    private volatile long putAt;
    private volatile long askedAt;
    private volatile boolean asked;

    /** Attaches the tab and returns its path in the UI; empty if the UI is off. */
    public String open(SparkContext context, String body, byte[] script, byte[] style) {
        if (context.ui().isEmpty()) {
            return "";
        }
        this.ui = (SparkUI) context.ui().get();
        this.script = script;
        this.style = style;
        synchronized (ui) {  // several sidecars may share one UI
            Set taken = new HashSet();
            scala.collection.Iterator tabs = ui.getTabs().iterator();
            while (tabs.hasNext()) {
                taken.add(((WebUITab) tabs.next()).prefix());
            }
            int number = 1;
            while (taken.contains(number == 1 ? PREFIX : PREFIX + "-" + number)) {
                number++;
            }
            String prefix = number == 1 ? PREFIX : PREFIX + "-" + number;
            this.files = "/" + prefix + "/files";
            this.tab = new Tab(ui, prefix, number == 1 ? "Headgate" : "Headgate " + number);
            this.tab.attachPage(new Page(tab, files, body));
            ui.attachHandler(files, this, "/");
            ui.attachTab(tab);
            return "/" + prefix + "/";
        }
    }

    /** How many milliseconds ago somebody last asked for the status; -1 if nobody has. */
    public long askedMillisAgo() {
        return asked ? (System.nanoTime() - askedAt) / 1000000L : -1L;
    }

    /** Takes a new status: JSON, compressed by gzip. Returns what askedMillisAgo returns. */
    public long put(byte[] compressed) {
        status = compressed;
        putAt = System.nanoTime();
        return askedMillisAgo();
    }

    /** Leaves the UI. Safe to call twice, and after the context has stopped. */
    public void close() {
        if (tab == null) {
            return;
        }
        synchronized (ui) {
            ui.detachTab(tab);
            ui.detachHandler("/" + tab.prefix() + "/json");  // some versions of Spark leave it behind
            ui.detachHandler(files);
            tab = null;
        }
        status = null;
    }

    protected void doGet(HttpServletRequest request, HttpServletResponse response) throws IOException {
        String uri = request.getRequestURI();
        String name = uri.substring(uri.lastIndexOf('/') + 1);
        if (name.equals("page.js")) {
            send(response, "text/javascript; charset=utf-8", script);
        } else if (name.equals("page.css")) {
            send(response, "text/css; charset=utf-8", style);
        } else if (name.equals("status.json")) {
            askedAt = System.nanoTime();
            asked = true;
            sendStatus(request, response);
        } else {
            response.sendError(404);
        }
    }

    protected void doTrace(HttpServletRequest request, HttpServletResponse response) throws IOException {
        response.sendError(405);
    }

    private void sendStatus(HttpServletRequest request, HttpServletResponse response) throws IOException {
        byte[] newest = status;
        if (newest == null || System.nanoTime() - putAt > FRESH_NANOS) {
            response.setStatus(204);  // the sidecar has been told by askedAt, and sends one within a second
            return;
        }
        String accepted = request.getHeader("Accept-Encoding");
        if (accepted != null && accepted.contains("gzip")) {
            response.setHeader("Content-Encoding", "gzip");
            send(response, "application/json", newest);
            return;
        }
        response.setContentType("application/json");
        GZIPInputStream plain = new GZIPInputStream(new ByteArrayInputStream(newest));
        byte[] buffer = new byte[8192];
        OutputStream out = response.getOutputStream();
        int read = plain.read(buffer);
        while (read >= 0) {
            out.write(buffer, 0, read);
            read = plain.read(buffer);
        }
    }

    private static void send(HttpServletResponse response, String type, byte[] content) throws IOException {
        response.setContentType(type);
        response.setHeader("X-Content-Type-Options", "nosniff");
        response.setContentLength(content.length);
        response.getOutputStream().write(content);
    }

    /** The entry in the navigation. */
    public static final class Tab extends SparkUITab {

        private final String title;

        Tab(SparkUI ui, String prefix, String title) {
            super(ui, prefix);
            this.title = title;
        }

        public String name() {
            return title;
        }
    }

    /** Spark's frame around the page's body, which brings its own script and style. */
    public static final class Page extends WebUIPage {

        private final Tab tab;
        private final String files;
        private final String body;

        Page(Tab tab, String files, String body) {
            super("");
            this.tab = tab;
            this.files = files;
            this.body = body;
        }

        public Seq render(HttpServletRequest request) {
            String base = UIUtils.prependBaseUri(request, "", "");
            String address = escaped(UIUtils.prependBaseUri(request, files, ""));
            String html = "<link rel=\"stylesheet\" type=\"text/css\" href=\"" + address + "/page.css\"/>"
                + body.replace("data-spark=\"\"", "data-spark=\"" + escaped(base) + "/\"")
                + "<script defer=\"defer\" src=\"" + address + "/page.js\"></script>";
            return inSparksFrame(request, new Content(html));
        }

        /** The frame's method has had different numbers of flags: false and None are right for all of them. */
        private Seq inSparksFrame(HttpServletRequest request, Content content) {
            Method[] methods = UIUtils.class.getMethods();
            for (int i = 0; i < methods.length; i++) {
                if (methods[i].getName().equals("headerSparkPage")) {
                    Class[] types = methods[i].getParameterTypes();
                    Object[] values = new Object[types.length];
                    for (int j = 0; j < types.length; j++) {
                        values[j] = value(types[j], request, content);
                    }
                    try {
                        return (Seq) methods[i].invoke(null, values);
                    } catch (Exception failure) {
                        throw new IllegalStateException("Spark's page frame failed: " + failure.getCause(), failure);
                    }
                }
            }
            throw new IllegalStateException("this Spark has no UIUtils.headerSparkPage");
        }

        private Object value(Class type, HttpServletRequest request, Content content) {
            if (type == HttpServletRequest.class) {
                return request;
            }
            if (type == String.class) {
                return tab.name();
            }
            if (type == boolean.class) {
                return Boolean.FALSE;
            }
            if (type == scala.Function0.class) {
                return content;
            }
            if (type == SparkUITab.class) {
                return tab;
            }
            return scala.Option.empty();
        }

        private static String escaped(String text) {
            return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\"", "&quot;");
        }
    }

    /** Ready HTML, as the node that Spark's frame asks for. */
    public static final class Content extends scala.runtime.AbstractFunction0 {

        private final String html;

        Content(String html) {
            this.html = html;
        }

        public Object apply() {
            return new scala.xml.Unparsed(html);
        }
    }
}
