// SPDX-License-Identifier: Apache-2.0

package headgate.relay;

import java.io.ByteArrayOutputStream;
import java.math.BigInteger;
import java.net.InetSocketAddress;
import java.net.Socket;
import java.security.MessageDigest;
import java.security.SecureRandom;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.Map;
import org.apache.spark.SparkContext;
import org.apache.spark.SparkContext$;
import org.apache.spark.sql.api.java.UDF1;
import org.apache.spark.sql.internal.SQLConf;

/**
 * The function by which a Spark Connect client opens its relay. Spark evaluates it on the driver, while it optimises
 * the plan of a query over a local relation.
 *
 * Its argument and its result are in the texts of plans, which the server's UI and event log show. So nothing in them
 * is secret: the two ends exchange Diffie-Hellman values (RFC 3526, group 14), and the key of the relay's connection is
 * sent combined with a digest of what they have in common, which is used for nothing else.
 *
 * Calls, as words between spaces; bytes are hexadecimal:
 *   offer IDENTITY VALUE
 *     -> offered VALUE
 *   open IDENTITY SEALED_KEY LEASE_MS CERTIFICATE HOST PORT [HOST PORT ...]
 *     -> opened, or: unreachable HOST PORT WHY
 * The relay dials the first address. The others are only tried. It serves the session in which Spark evaluates the
 * call, which the tag of the operation names. Spark may evaluate a call more than once, so the same call of a session
 * has the same result and is carried out once.
 */
public final class SessionFunction implements UDF1<String, String> {

    private static final int DIAL_TIMEOUT_MS = 5000;
    private static final int REMEMBERED_MAX = 256;
    private static final BigInteger PRIME = new BigInteger(
            "ffffffffffffffffc90fdaa22168c234c4c6628b80dc1cd129024e088a67cc74"
            + "020bbea63b139b22514a08798e3404ddef9519b3cd3a431b302b0a6df25f1437"
            + "4fe1356d6d51c245e485b576625e7ec6f44c42e9a637ed6b0bff5cb6f406b7ed"
            + "ee386bfb5a899fa5ae9f24117c4b1fe649286651ece45b3dc2007cb8a163bf05"
            + "98da48361c55d39a69163fa8fd24cf5f83655d23dca3ad961c62f356208552bb"
            + "9ed529077096966d670c354e4abc9804f1746c08ca18217c32905e462e36ce3b"
            + "e39e772c180e86039b2783a2ec07a28fb5c55df06f4c52c9de2bcbf695581718"
            + "3995497cea956ae515d2261898fa051015728e5a8aacaa68ffffffffffffffff",
            16);
    private static final BigInteger BASE = BigInteger.TWO;
    private static final int VALUE_BYTES = 256;

    private static final Map<String, byte[]> pads = new LinkedHashMap<>();
    private static final Map<String, String> answers = new LinkedHashMap<>();

    @Override
    public String call(String text) throws Exception {
        if (SparkContext$.MODULE$.getActive().isEmpty()) {
            return "elsewhere";
        }
        SparkContext context = SparkContext$.MODULE$.getActive().get();
        String origin = SessionRelay.originOf(context.getLocalProperties());
        if (origin == null || SQLConf.get().contains(SessionRelay.TAGS)) { // see InstalledRelays
            return "sessionless";
        }
        synchronized (SessionFunction.class) {
            String asked = origin + " " + text; // what one session has said, another one can read and say again
            String answer = answers.get(asked);
            if (answer == null) {
                answer = answer(context, origin, text.split(" "));
                remember(answers, asked, answer);
            }
            return answer;
        }
    }

    private static String answer(SparkContext context, String origin, String[] words) throws Exception {
        if (words[0].equals("offer") && words.length == 3) {
            return offer(origin + " " + words[1], new BigInteger(words[2], 16));
        }
        if (words[0].equals("open") && words.length >= 7 && words.length % 2 == 1) {
            return open(context, origin, words);
        }
        return "unknown";
    }

    private static String offer(String asker, BigInteger theirs) throws Exception {
        if (theirs.compareTo(BigInteger.TWO) < 0 || theirs.compareTo(PRIME.subtract(BigInteger.TWO)) > 0) {
            return "unknown";
        }
        byte[] random = new byte[VALUE_BYTES];
        new SecureRandom().nextBytes(random);
        BigInteger ours = new BigInteger(1, random).mod(PRIME.subtract(BigInteger.TWO)).add(BigInteger.ONE);
        MessageDigest digest = MessageDigest.getInstance("SHA-256");
        digest.update(padded(theirs.modPow(ours, PRIME)));
        remember(pads, asker, digest.digest());
        return "offered " + HexFormat.of().formatHex(padded(BASE.modPow(ours, PRIME)));
    }

    private static String open(SparkContext context, String origin, String[] words) throws Exception {
        byte[] identity = HexFormat.of().parseHex(words[1]);
        String asker = origin + " " + words[1];
        byte[] pad = pads.get(asker);
        if (pad == null) {
            return "unknown";
        }
        for (int i = 5; i < words.length; i += 2) {
            String problem = dial(words[i], Integer.parseInt(words[i + 1]));
            if (problem != null) {
                return "unreachable " + words[i] + " " + words[i + 1] + " " + problem;
            }
        }
        pads.remove(asker);
        byte[] key = HexFormat.of().parseHex(words[2]);
        for (int i = 0; i < key.length; i++) {
            key[i] ^= pad[i];
        }
        byte[] certificate = words[4].equals("-") ? new byte[0] : HexFormat.of().parseHex(words[4]);
        ByteArrayOutputStream credentials = new ByteArrayOutputStream();
        credentials.write(identity);
        credentials.write(key);
        credentials.write(certificate);
        SessionRelay relay = new SessionRelay(origin, Long.parseLong(words[3]));
        relay.begin(context, words[5], Integer.parseInt(words[6]), credentials.toByteArray());
        return "opened";
    }

    /** Why an address cannot be reached from here; null if it can. */
    private static String dial(String host, int port) {
        try (Socket socket = new Socket()) {
            socket.connect(new InetSocketAddress(host, port), DIAL_TIMEOUT_MS);
            return null;
        } catch (Exception failure) {
            return String.valueOf(failure);
        }
    }

    private static byte[] padded(BigInteger value) {
        byte[] bytes = value.toByteArray();
        byte[] result = new byte[VALUE_BYTES];
        int size = Math.min(bytes.length, VALUE_BYTES);
        System.arraycopy(bytes, bytes.length - size, result, VALUE_BYTES - size, size);
        return result;
    }

    private static <T> void remember(Map<String, T> map, String key, T value) {
        map.put(key, value);
        if (map.size() > REMEMBERED_MAX) {
            map.remove(map.keySet().iterator().next());
        }
    }
}
