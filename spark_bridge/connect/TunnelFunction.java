// SPDX-License-Identifier: Apache-2.0

package headgate.relay;

import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.security.SecureRandom;
import java.util.Base64;
import java.util.HexFormat;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.spark.SparkConf;
import org.apache.spark.SparkContext;
import org.apache.spark.SparkContext$;
import org.apache.spark.connect.proto.ExecutePlanResponse;
import org.apache.spark.internal.config.ConfigBuilder;
import org.apache.spark.internal.config.ConfigEntry;
import org.apache.spark.internal.config.ConfigEntry$;
import org.apache.spark.sql.api.java.UDF1;
import org.apache.spark.sql.connect.service.ExecuteHolder;
import org.apache.spark.sql.connect.service.SessionHolder;
import org.apache.spark.sql.connect.service.SparkConnectService$;
import org.apache.spark.sql.internal.SQLConf;
import org.apache.spark.sql.internal.SQLConf$;
import org.sparkproject.connect.protobuf.Any;
import org.sparkproject.connect.protobuf.UnsafeByteOperations;
import scala.runtime.AbstractFunction1;

/**
 * The function by which a Spark Connect client uses its tunnel. Spark evaluates it on the driver, while it optimises
 * the plan of a query over a local relation. Unlike that of SessionFunction, its calls wait for nothing of each other.
 *
 * An argument begins with the number of a call:
 *   0 open: a new name (16 bytes), lease in ms (i64), count of doors (u8)
 *     -> the host, the port of each door, and a key, as words
 *   1 push: name, pause in ms, the packet up to which all have come (i64 each), the id of this operation (text)
 *     -> nothing. It lasts; the packets are extensions among the responses of the operation
 *   2 poll: name, pause in ms, the packet up to which all have come (i64 each)
 *     -> a packet
 *   3 up: a key (16 bytes), a packet
 *   4 close: name
 * Names may be read by everybody in the texts of plans. So what has a name is for the session that has opened the
 * tunnel, as the tag of the operation says. Keys are in no text: an analysis has no tag, and no text either.
 *
 * The quickest way up is a setting whose name ends with the key. A client asks for it with a packet, in base 64, as the
 * default, and Spark has the setting look whether that is valid. Spark answers with the default, perhaps redacted, also
 * if there is no such setting: whether the tunnel is still open, a push says.
 */
public final class TunnelFunction implements UDF1<byte[], byte[]> {

    private static final String SETTING = "spark.headgate.tunnel.";
    private static final int NAME_BYTES = 16;
    private static final int TUNNELS_MAX = 16;
    private static final String TYPE = "headgate/tunnel";

    /** A tunnel, by its name and its session. */
    private record Opened(String text, Tunnel tunnel) { }

    private static final ConcurrentHashMap<String, Opened> byName = new ConcurrentHashMap<>();
    private static final ConcurrentHashMap<String, Tunnel> byKey = new ConcurrentHashMap<>();

    @Override
    public byte[] call(byte[] argument) throws Exception {
        if (SparkContext$.MODULE$.getActive().isEmpty()) {
            return text("elsewhere");
        }
        SparkContext context = SparkContext$.MODULE$.getActive().get();
        ByteBuffer words = ByteBuffer.wrap(argument);
        byte call = words.get();
        String name = hex(words);
        if (call == 3) {
            tunnel(byKey.get(name)).receive(words);
            return new byte[0];
        }
        String origin = SessionRelay.originOf(context.getLocalProperties());
        if (origin == null || SQLConf.get().contains(SessionRelay.TAGS)) { // see InstalledRelays
            return text("sessionless");
        }
        String asked = origin + " " + name;
        Opened opened = byName.get(asked);
        switch (call) {
            case 0:
                return text(open(context.conf(), origin, asked, words));
            case 1:
                push(tunnel(opened == null ? null : opened.tunnel()), origin, words);
                return new byte[0];
            case 2:
                return poll(tunnel(opened == null ? null : opened.tunnel()), words);
            case 4:
                if (opened != null) {
                    opened.tunnel().close();
                }
                return new byte[0];
            default:
                return text("unknown");
        }
    }

    private static Tunnel tunnel(Tunnel found) {
        if (found == null) {
            throw new IllegalStateException("this tunnel is closed");
        }
        return found;
    }

    /** The same call again, which Spark may make, has the same result. */
    private static synchronized String open(SparkConf conf, String origin, String asked, ByteBuffer words)
            throws Exception {
        Opened opened = byName.get(asked);
        if (opened != null) {
            return opened.text();
        }
        if (byName.keySet().stream().filter(other -> other.startsWith(origin + " ")).count() >= TUNNELS_MAX) {
            return "full"; // this session is; if the relay is installed, there are those of other sessions, too
        }
        long leaseMs = words.getLong();
        int doors = words.get();
        byte[] random = new byte[NAME_BYTES];
        new SecureRandom().nextBytes(random);
        String key = HexFormat.of().formatHex(random);
        String host = conf.get("spark.driver.host");
        ConfigEntry<?>[] setting = new ConfigEntry<?>[1];
        Tunnel tunnel = new Tunnel(conf.get("spark.driver.bindAddress", host), doors, leaseMs, () -> {
            byName.remove(asked);
            byKey.remove(key);
            unregister(setting[0]);
        });
        byKey.put(key, tunnel);
        setting[0] = register(key, tunnel);
        StringBuilder text = new StringBuilder(host);
        for (int door = 0; door < doors; door++) {
            text.append(' ').append(tunnel.port(door));
        }
        opened = new Opened(text.append(' ').append(key).toString(), tunnel);
        byName.put(asked, opened);
        return opened.text();
    }

    // ---- down ----------------------------------------------------------------------------------------------------

    private static void push(Tunnel tunnel, String origin, ByteBuffer words) throws Exception {
        long pauseMs = words.getLong();
        long acknowledged = words.getLong();
        ExecuteHolder holder = holder(origin, StandardCharsets.UTF_8.decode(words).toString());
        tunnel.push(acknowledged, pauseMs, packet -> {
            Any.Builder any = Any.newBuilder().setTypeUrl(TYPE).setValue(UnsafeByteOperations.unsafeWrap(packet));
            return holder.responseObserver().tryOnNext(ExecutePlanResponse.newBuilder()
                    .setSessionId(holder.sessionHolder().sessionId())
                    .setServerSideSessionId(holder.sessionHolder().serverSessionId())
                    .setOperationId(holder.operationId())
                    .setExtension(any)
                    .build());
        });
    }

    /** The ids of operations are public, too: packets must not get among the responses of another session. */
    private static ExecuteHolder holder(String origin, String operation) {
        scala.collection.Iterator<ExecuteHolder> each =
                SparkConnectService$.MODULE$.executionManager().listExecuteHolders().iterator();
        while (each.hasNext()) {
            ExecuteHolder holder = each.next();
            SessionHolder session = holder.sessionHolder();
            if (holder.operationId().equals(operation)
                    && origin.equals(SessionRelay.origin(session.userId(), session.sessionId()))) {
                return holder;
            }
        }
        throw new IllegalStateException("this session has no operation " + operation);
    }

    private static byte[] poll(Tunnel tunnel, ByteBuffer words) throws Exception {
        long pauseMs = words.getLong();
        return tunnel.poll(words.getLong(), pauseMs);
    }

    // ---- up ------------------------------------------------------------------------------------------------------

    private static ConfigEntry<?> register(String key, Tunnel tunnel) throws Exception {
        ConfigBuilder builder = SQLConf$.MODULE$.buildConf(SETTING + key).internal().doc("").version("4.1.0");
        ConfigEntry<String> setting = withPolicy(builder).stringConf().transform(new AbstractFunction1<String, String>() {
            @Override
            public String apply(String value) {
                if (!value.isEmpty()) {
                    tunnel.receive(ByteBuffer.wrap(Base64.getDecoder().decode(value)));
                }
                return "";
            }
        }).createWithDefault("");
        ConfigEntry$.MODULE$.knownConfigs().remove(setting.key()); // Spark's UI shows the names of those
        return setting;
    }

    /** Since Spark 4.2, each setting has to say what it means for views. */
    private static ConfigBuilder withPolicy(ConfigBuilder builder) throws Exception {
        Class<?> policies;
        try {
            policies = Class.forName("org.apache.spark.internal.config.ConfigBindingPolicy$");
        } catch (ClassNotFoundException before) {
            return builder;
        }
        Object none = policies.getMethod("NOT_APPLICABLE").invoke(policies.getField("MODULE$").get(null));
        return (ConfigBuilder) ConfigBuilder.class
                .getMethod("withBindingPolicy", scala.Enumeration.Value.class)
                .invoke(builder, none);
    }

    private static void unregister(ConfigEntry<?> setting) {
        if (setting != null) {
            SQLConf$.MODULE$.unregister(setting);
        }
    }

    // ---- words ---------------------------------------------------------------------------------------------------

    private static String hex(ByteBuffer words) {
        byte[] bytes = new byte[NAME_BYTES];
        words.get(bytes);
        return HexFormat.of().formatHex(bytes);
    }

    private static byte[] text(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }
}
