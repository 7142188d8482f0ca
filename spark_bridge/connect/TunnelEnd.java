// SPDX-License-Identifier: Apache-2.0

package headgate.relay;

import java.nio.ByteBuffer;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Deque;
import java.util.HashMap;
import java.util.Iterator;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;

/**
 * The server's end of a tunnel: the machine of protocol/tunnel.py, whose text explains it. Change the two files
 * together. This end opens the channels. Not thread-safe.
 */
final class TunnelEnd {

    /** The limits; both ends use the same. */
    static final int CHANNELS_MAX = 10_000;
    static final int CHANNEL_BYTES_MAX = 16 << 20;
    static final int TOTAL_BYTES_MAX = 48 << 20;
    static final int CHANNEL_BYTES_LEAST = 16 << 10;
    static final int PACKET_BYTES_MAX = 4 << 20;
    static final int PACKETS_MAX = 1024;

    private static final int HEAD = 16;
    private static final int FRAME = 9;
    private static final int CHUNK_BYTES = 64 << 10;
    private static final byte OPEN = 1;
    private static final byte DATA = 2;
    private static final byte END = 3;
    private static final byte RESET = 4;
    private static final byte CREDIT = 5;

    /** The other end has said something that it must not: the tunnel is over. */
    static final class Refused extends Exception {
        Refused(String why) {
            super(why);
        }
    }

    /** What happens to the channels, in order. */
    interface Events {
        /** Pass the data on, and then call consumed. */
        void received(int channel, ByteBuffer data);

        void ended(int channel);

        void reset(int channel);
    }

    private record Packet(int size, byte[] body) { }

    private static final class Channel {
        final Deque<ByteBuffer> unsent = new ArrayDeque<>();
        long unsentBytes;
        boolean wasFull;
        boolean ends;
        boolean endSent;
        boolean peerEnded;
    }

    private final Map<Integer, Channel> channels = new HashMap<>();
    private int newest;
    private final Deque<ByteBuffer> control = new ArrayDeque<>();
    private final Set<Integer> ready = new LinkedHashSet<>();
    private final Set<Integer> blocked = new LinkedHashSet<>();
    private List<Integer> drained = new ArrayList<>();
    private final Map<Integer, Integer> uncredited = new HashMap<>();
    private long uncreditedTotal;
    private final Map<Integer, Integer> unconsumed = new HashMap<>();
    private final Map<Integer, Integer> credits = new LinkedHashMap<>();
    private long heldTotal;
    private boolean creditDue;
    private long number;
    private final TreeMap<Long, Packet> kept = new TreeMap<>();
    private long keptBytes;
    private Deque<Long> again = new ArrayDeque<>();
    private long taken;
    private final Map<Long, ByteBuffer> early = new HashMap<>();
    private long earlyBytes;
    private long acknowledged;
    private long bytesSince;
    private boolean ackDue;

    // ---- channels --------------------------------------------------------------------------------------------

    boolean canOpen() {
        return channels.size() < CHANNELS_MAX && keptBytes + (long) FRAME * control.size() < TOTAL_BYTES_MAX;
    }

    int open(int door) {
        channels.put(++newest, new Channel());
        control.add(frame(newest, OPEN, door));
        return newest;
    }

    void write(int id, ByteBuffer data) {
        Channel channel = channels.get(id);
        if (channel == null || !data.hasRemaining()) {
            return;
        }
        channel.unsent.add(data);
        channel.unsentBytes += data.remaining();
        channel.wasFull |= channel.unsentBytes > PACKET_BYTES_MAX;
        if (!blocked.contains(id)) {
            ready.add(id);
        }
    }

    boolean isFull(int id) {
        Channel channel = channels.get(id);
        return channel != null && channel.wasFull;
    }

    List<Integer> takeDrained() {
        List<Integer> result = drained;
        drained = new ArrayList<>();
        return result;
    }

    void end(int id) {
        Channel channel = channels.get(id);
        if (channel != null && !channel.ends) {
            channel.ends = true;
            if (!blocked.contains(id)) {
                ready.add(id);
            }
        }
    }

    void reset(int id) {
        if (channels.containsKey(id)) {
            control.add(frame(id, RESET, 0));
            forget(id);
        }
    }

    void consumed(int id, int count) {
        int waiting = unconsumed.getOrDefault(id, 0);
        count = Math.min(count, waiting);
        if (count == 0) {
            return;
        }
        if (count == waiting) {
            unconsumed.remove(id);
        } else {
            unconsumed.put(id, waiting - count);
        }
        int credit = credits.merge(id, count, Integer::sum);
        creditDue |= credit >= (isTight() ? CHANNEL_BYTES_LEAST / 2 : CHANNEL_BYTES_MAX / 4);
    }

    private void forget(int id) {
        channels.remove(id);
        ready.remove(id);
        blocked.remove(id);
        consumed(id, unconsumed.getOrDefault(id, 0));
    }

    private boolean isTight() {
        return share(heldTotal) < CHANNEL_BYTES_MAX;
    }

    private static long share(long total) {
        return Math.max(CHANNEL_BYTES_LEAST, Math.min(CHANNEL_BYTES_MAX, (TOTAL_BYTES_MAX - total) / 2));
    }

    // ---- sending ---------------------------------------------------------------------------------------------

    /** The next packet to send; null if there is nothing. With keepalive, there always is one. */
    byte[] nextPacket(boolean keepalive) {
        while (!again.isEmpty()) {
            Long next = again.poll();
            Packet packet = kept.get(next);
            if (packet != null && packet.body() != null) {
                return packet(next, packet.body());
            }
        }
        if (kept.size() < PACKETS_MAX && keptBytes < TOTAL_BYTES_MAX) {
            byte[] body = frames(keepalive);
            if (body.length > 0) {
                kept.put(++number, new Packet(body.length, body));
                keptBytes += body.length;
                return packet(number, body);
            }
        }
        return ackDue || keepalive ? packet(0, new byte[0]) : null;
    }

    void sendAllAgain() {
        again = new ArrayDeque<>(kept.keySet());
    }

    private byte[] packet(long which, byte[] body) {
        acknowledged = taken;
        bytesSince = 0;
        ackDue = false;
        return ByteBuffer.allocate(HEAD + body.length).putLong(which).putLong(taken).put(body).array();
    }

    private byte[] frames(boolean keepalive) {
        List<ByteBuffer> parts = new ArrayList<>();
        long left = PACKET_BYTES_MAX;
        while (!control.isEmpty() && left > 0) {
            left -= FRAME;
            parts.add(control.poll());
        }
        if (!credits.isEmpty() && (creditDue || keepalive || !ready.isEmpty())) {
            for (Map.Entry<Integer, Integer> credit : credits.entrySet()) {
                left -= FRAME;
                heldTotal -= credit.getValue();
                parts.add(frame(credit.getKey(), CREDIT, credit.getValue()));
            }
            credits.clear();
            creditDue = false;
        }
        while (!ready.isEmpty() && left > 0) {
            Iterator<Integer> first = ready.iterator();
            int id = first.next();
            first.remove();
            left -= dataOf(id, Math.min(left, CHUNK_BYTES), parts);
        }
        int size = 0;
        for (ByteBuffer part : parts) {
            size += part.remaining();
        }
        ByteBuffer body = ByteBuffer.allocate(size);
        for (ByteBuffer part : parts) {
            body.put(part);
        }
        return body.array();
    }

    private long dataOf(int id, long sizeMax, List<ByteBuffer> parts) {
        Channel channel = channels.get(id);
        int sent = uncredited.getOrDefault(id, 0);
        int size = (int) Math.min(Math.min(sizeMax, channel.unsentBytes), share(uncreditedTotal) - sent);
        long added = 0;
        if (size > 0) {
            added += FRAME + size;
            parts.add(frame(id, DATA, size));
            uncredited.put(id, sent + size);
            uncreditedTotal += size;
            channel.unsentBytes -= size;
            while (size > 0) {
                ByteBuffer part = channel.unsent.peek();
                if (part.remaining() <= size) {
                    channel.unsent.poll();
                    size -= part.remaining();
                    parts.add(part);
                } else {
                    parts.add(part.slice(part.position(), size));
                    part.position(part.position() + size);
                    size = 0;
                }
            }
        } else if (channel.unsentBytes > 0) {
            blocked.add(id);
            return 0;
        }
        if (channel.wasFull && channel.unsentBytes <= PACKET_BYTES_MAX) {
            channel.wasFull = false;
            drained.add(id);
        }
        if (channel.unsentBytes > 0) {
            ready.add(id);
        } else if (channel.ends && !channel.endSent) {
            channel.endSent = true;
            added += FRAME;
            parts.add(frame(id, END, 0));
            forgetIfBothEnded(id, channel);
        }
        return added;
    }

    private void forgetIfBothEnded(int id, Channel channel) {
        if (channel.endSent && channel.peerEnded) {
            channels.remove(id);
        }
    }

    private static ByteBuffer frame(int id, byte kind, int count) {
        return ByteBuffer.allocate(FRAME).putInt(id).put(kind).putInt(count).flip();
    }

    // ---- receiving -------------------------------------------------------------------------------------------

    void acknowledge(long upTo) throws Refused {
        if (upTo < 0 || upTo > number) {
            throw new Refused("packet " + upTo + " was acknowledged before it was sent");
        }
        while (!kept.isEmpty() && kept.firstKey() <= upTo) {
            keptBytes -= kept.pollFirstEntry().getValue().size();
        }
    }

    void receive(ByteBuffer data, Events events) throws Refused {
        if (data.remaining() < HEAD) {
            throw new Refused("a packet of " + data.remaining() + " bytes has no head");
        }
        long which = data.getLong();
        acknowledge(data.getLong());
        if (which == 0) {
            return;
        }
        if (which <= taken || early.containsKey(which)) {
            ackDue = true; // perhaps the other end has not learnt that it is here
            return;
        }
        if (which > taken + PACKETS_MAX) {
            throw new Refused("packet " + which + " is too far ahead of " + taken);
        }
        early.put(which, data);
        earlyBytes += data.remaining();
        if (earlyBytes > 2L * TOTAL_BYTES_MAX + PACKET_BYTES_MAX) {
            throw new Refused("packets that came too early take too much memory");
        }
        for (ByteBuffer next = early.remove(taken + 1); next != null; next = early.remove(taken + 1)) {
            earlyBytes -= next.remaining();
            taken++;
            bytesSince += next.remaining();
            take(next, events);
        }
        ackDue |= bytesSince >= PACKET_BYTES_MAX || taken - acknowledged >= PACKETS_MAX / 4;
    }

    private void take(ByteBuffer packet, Events events) throws Refused {
        while (packet.hasRemaining()) {
            if (packet.remaining() < FRAME) {
                throw new Refused(packet.remaining() + " bytes at the end of a packet are not a frame");
            }
            int id = packet.getInt();
            byte kind = packet.get();
            int count = packet.getInt();
            if (id <= 0 || id > newest) {
                throw new Refused("channel " + id + " was never opened");
            }
            if (kind == DATA) {
                if (count <= 0 || count > packet.remaining()) {
                    throw new Refused("a frame claims " + count + " bytes of " + packet.remaining());
                }
                ByteBuffer data = packet.slice(packet.position(), count);
                packet.position(packet.position() + count);
                takeData(id, data, events);
            } else if (kind == CREDIT) {
                takeCredit(id, count);
            } else if (kind == END || kind == RESET) {
                takeEnd(id, kind, events);
            } else {
                throw new Refused("unknown kind of frame: " + kind);
            }
        }
    }

    private void takeData(int id, ByteBuffer data, Events events) throws Refused {
        int size = data.remaining();
        int waiting = unconsumed.merge(id, size, Integer::sum);
        heldTotal += size;
        long over = heldTotal - TOTAL_BYTES_MAX;
        if (waiting + credits.getOrDefault(id, 0) > CHANNEL_BYTES_MAX
                || over > 0 && over > (long) channelsHeld() * CHANNEL_BYTES_LEAST) {
            throw new Refused("channel " + id + " has sent more than its credit");
        }
        Channel channel = channels.get(id);
        if (channel == null) { // it was reset here
            consumed(id, size);
        } else if (channel.peerEnded) {
            throw new Refused("channel " + id + " has data after its end");
        } else {
            events.received(id, data);
        }
        if (isTight() && !credits.isEmpty()) {
            creditDue = true;
        }
    }

    private int channelsHeld() {
        Set<Integer> held = new LinkedHashSet<>(unconsumed.keySet());
        held.addAll(credits.keySet());
        return held.size();
    }

    private void takeEnd(int id, byte kind, Events events) throws Refused {
        Channel channel = channels.get(id);
        if (channel == null) { // it was reset here
            return;
        }
        if (kind == RESET) {
            forget(id);
            events.reset(id);
        } else if (channel.peerEnded) {
            throw new Refused("channel " + id + " has ended twice");
        } else {
            channel.peerEnded = true;
            forgetIfBothEnded(id, channel);
            events.ended(id);
        }
    }

    private void takeCredit(int id, int count) throws Refused {
        int left = uncredited.getOrDefault(id, 0) - count;
        if (left < 0 || count <= 0) {
            throw new Refused("channel " + id + " was given credit of " + count + " bytes too much");
        }
        uncreditedTotal -= count;
        if (left > 0) {
            uncredited.put(id, left);
        } else {
            uncredited.remove(id);
        }
        ready.addAll(blocked);
        blocked.clear();
    }
}
