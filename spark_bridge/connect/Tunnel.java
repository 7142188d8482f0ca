// SPDX-License-Identifier: Apache-2.0

package headgate.relay;

import java.io.IOException;
import java.net.InetSocketAddress;
import java.net.StandardSocketOptions;
import java.nio.ByteBuffer;
import java.nio.channels.SelectionKey;
import java.nio.channels.Selector;
import java.nio.channels.ServerSocketChannel;
import java.nio.channels.SocketChannel;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Deque;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;

/**
 * The server's half of the tunnel of a client that nobody can dial. Its doors are ports on this host, which tasks dial
 * in the client's place. What they say travels to the client in packets, and back.
 *
 * One thread accepts and reads. Calls of the client bring packets, on threads of Spark Connect, which also write what is
 * in them. One call of the client waits for packets, and sends them. Everything is guarded by this object's lock.
 *
 * It closes by itself after a lease without a call of the client: the client may have been killed.
 */
final class Tunnel implements TunnelEnd.Events {

    private static final int BACKLOG = 1024;
    private static final int READ_BYTES = 64 << 10;
    private static final long LOOK_MS = 250;

    /** One accepted connection. */
    private static final class Connection {
        final int channel;
        final SocketChannel socket;
        final SelectionKey key;
        final Deque<ByteBuffer> unwritten = new ArrayDeque<>();
        boolean reads = true;
        boolean peerEnded;
        boolean ends;

        Connection(int channel, SocketChannel socket, SelectionKey key) {
            this.channel = channel;
            this.socket = socket;
            this.key = key;
        }
    }

    private final TunnelEnd end = new TunnelEnd();
    private final Map<Integer, Connection> connections = new HashMap<>();
    private final List<SelectionKey> doors = new ArrayList<>();
    private final Selector selector = Selector.open();
    private final Runnable whenClosed;
    private final long leaseNs;
    private long heardNs = System.nanoTime();
    private int newestPush;
    private boolean isAccepting = true;
    private boolean isClosed;

    /** Listens at so many doors on the host. */
    Tunnel(String bindHost, int doorCount, long leaseMs, Runnable whenClosed) throws IOException {
        this.whenClosed = whenClosed;
        leaseNs = TimeUnit.MILLISECONDS.toNanos(leaseMs);
        try {
            for (int door = 0; door < doorCount; door++) {
                ServerSocketChannel listener = ServerSocketChannel.open();
                doors.add(listener.configureBlocking(false).register(selector, SelectionKey.OP_ACCEPT, door));
                listener.bind(new InetSocketAddress(bindHost, 0), BACKLOG);
            }
        } catch (IOException | RuntimeException failure) {
            closeDoors();
            throw failure;
        }
        Thread thread = new Thread(this::serve, "headgate-tunnel");
        thread.setDaemon(true);
        thread.start();
    }

    /** The port of a door. */
    int port(int door) {
        return ((ServerSocketChannel) doors.get(door).channel()).socket().getLocalPort();
    }

    // ---- for the client's calls ----------------------------------------------------------------------------------

    /** Where packets go; false if no more can. */
    interface Sink {
        boolean put(byte[] packet);
    }

    /** A packet of the client has come. What it must not say closes the tunnel. */
    synchronized void receive(ByteBuffer packet) {
        if (isClosed) {
            throw new IllegalStateException("this tunnel is closed");
        }
        heardNs = System.nanoTime();
        try {
            end.receive(packet, this);
        } catch (TunnelEnd.Refused refusal) {
            close();
            throw new IllegalArgumentException("the tunnel is closed: " + refusal.getMessage());
        }
        acceptAgain();
        notifyAll();
    }

    /**
     * Send what there is, until the next call of this method, or the end. The client has all up to a packet. Between
     * packets, an empty one shows the client that the call still stands.
     */
    void push(long acknowledged, long pauseMs, Sink sink) throws InterruptedException, TunnelEnd.Refused {
        int push = beginPush(acknowledged);
        byte[] packet;
        do {
            packet = await(push, pauseMs);
        } while (packet != null && sink.put(packet));
    }

    /** The next packet, for a client that asks for each. The client has all up to a packet. */
    byte[] poll(long acknowledged, long pauseMs) throws InterruptedException, TunnelEnd.Refused {
        byte[] packet = await(beginPush(acknowledged), pauseMs);
        return packet == null ? new byte[0] : packet;
    }

    private synchronized int beginPush(long acknowledged) throws TunnelEnd.Refused {
        heardNs = System.nanoTime();
        end.acknowledge(acknowledged);
        end.sendAllAgain();
        notifyAll();
        return ++newestPush;
    }

    /** The next packet, or an empty one after the pause; null if another call has taken over, or the tunnel is over. */
    private synchronized byte[] await(int push, long pauseMs) throws InterruptedException {
        long until = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(pauseMs);
        while (!isClosed && push == newestPush) {
            long leftMs = TimeUnit.NANOSECONDS.toMillis(until - System.nanoTime());
            byte[] packet = end.nextPacket(leftMs <= 0);
            if (packet != null) {
                for (int channel : end.takeDrained()) {
                    readAgain(connections.get(channel));
                }
                return packet;
            }
            wait(leftMs);
        }
        return null;
    }

    /** Close every connection and every door. Idempotent. */
    synchronized void close() {
        if (isClosed) {
            return;
        }
        isClosed = true;
        closeDoors();
        for (Connection connection : connections.values()) {
            abort(connection);
        }
        connections.clear();
        notifyAll();
        whenClosed.run();
    }

    private void closeDoors() {
        try {
            for (SelectionKey door : doors) {
                door.channel().close();
            }
            selector.close();
        } catch (IOException failure) {
            // whatever it was, the system closes it with the process
        }
    }

    // ---- on the tunnel's thread ------------------------------------------------------------------------------------

    private void serve() {
        ByteBuffer buffer = ByteBuffer.allocateDirect(READ_BYTES);
        try {
            while (true) {
                selector.select(LOOK_MS);
                synchronized (this) {
                    if (isClosed) {
                        return;
                    }
                    if (System.nanoTime() - heardNs > leaseNs) {
                        break;
                    }
                    for (SelectionKey key : selector.selectedKeys()) {
                        serve(key, buffer);
                    }
                    selector.selectedKeys().clear();
                    notifyAll();
                }
            }
        } catch (IOException | RuntimeException failure) {
            // the selector has been closed, or cannot be used
        }
        close();
    }

    private void serve(SelectionKey key, ByteBuffer buffer) {
        if (!key.isValid()) {
            return;
        }
        if (key.isAcceptable()) {
            accept(key);
            return;
        }
        Connection connection = (Connection) key.attachment();
        if (key.isWritable()) {
            write(connection);
        }
        if (key.isValid() && key.isReadable()) {
            read(connection, buffer);
        }
    }

    private void accept(SelectionKey door) {
        try {
            while (end.canOpen()) {
                SocketChannel socket = ((ServerSocketChannel) door.channel()).accept();
                if (socket == null) {
                    return;
                }
                socket.configureBlocking(false);
                socket.setOption(StandardSocketOptions.TCP_NODELAY, true);
                SelectionKey key = socket.register(selector, SelectionKey.OP_READ);
                Connection connection = new Connection(end.open((Integer) door.attachment()), socket, key);
                key.attach(connection);
                connections.put(connection.channel, connection);
            }
        } catch (IOException failure) {
            // no file descriptor is left, or the peer is gone: the next one is accepted after a look
        }
        setAccepting(false);
    }

    /** A door that is not served would wake its thread all the time. */
    private void setAccepting(boolean accepts) {
        isAccepting = accepts;
        for (SelectionKey door : doors) {
            door.interestOps(accepts ? SelectionKey.OP_ACCEPT : 0);
        }
    }

    private void acceptAgain() {
        if (!isAccepting && end.canOpen()) {
            setAccepting(true);
            selector.wakeup();
        }
    }

    private void read(Connection connection, ByteBuffer buffer) {
        buffer.clear();
        try {
            int count = connection.socket.read(buffer);
            if (count > 0) {
                byte[] data = new byte[count];
                buffer.flip().get(data);
                end.write(connection.channel, ByteBuffer.wrap(data));
                connection.reads = !end.isFull(connection.channel);
            } else if (count < 0) {
                connection.peerEnded = true;
                connection.reads = false;
                end.end(connection.channel);
                closeIfBothEnded(connection);
            }
            watch(connection);
        } catch (IOException failure) {
            lose(connection);
        }
    }

    // ---- what the client says --------------------------------------------------------------------------------------

    @Override
    public void received(int channel, ByteBuffer data) {
        Connection connection = connections.get(channel);
        if (connection == null) {
            end.consumed(channel, data.remaining());
            return;
        }
        connection.unwritten.add(data);
        if (connection.unwritten.size() == 1) {
            write(connection);
        }
    }

    @Override
    public void ended(int channel) {
        Connection connection = connections.get(channel);
        if (connection != null) {
            connection.ends = true;
            write(connection);
        }
    }

    @Override
    public void reset(int channel) {
        Connection connection = connections.remove(channel);
        if (connection != null) {
            abort(connection);
        }
    }

    private void write(Connection connection) {
        int written = 0;
        try {
            while (!connection.unwritten.isEmpty()) {
                ByteBuffer data = connection.unwritten.peek();
                written += connection.socket.write(data);
                if (data.hasRemaining()) {
                    break;
                }
                connection.unwritten.poll();
            }
            end.consumed(connection.channel, written);
            if (connection.ends && connection.unwritten.isEmpty()) {
                connection.socket.shutdownOutput();
                closeIfBothEnded(connection);
            }
            watch(connection);
        } catch (IOException failure) {
            lose(connection);
        }
    }

    private void closeIfBothEnded(Connection connection) throws IOException {
        if (connection.peerEnded && connection.ends && connection.unwritten.isEmpty()) {
            connections.remove(connection.channel);
            connection.socket.close();
        }
    }

    /** The connection has broken. */
    private void lose(Connection connection) {
        connections.remove(connection.channel);
        end.reset(connection.channel);
        abort(connection);
        notifyAll();
    }

    private static void abort(Connection connection) {
        try {
            connection.socket.setOption(StandardSocketOptions.SO_LINGER, 0);
            connection.socket.close();
        } catch (IOException failure) {
            // it is closed
        }
    }

    private void readAgain(Connection connection) {
        if (connection != null && !connection.peerEnded) {
            connection.reads = true;
            watch(connection);
        }
    }

    /** Tell the tunnel's thread what to wait for. */
    private void watch(Connection connection) {
        if (!connection.key.isValid()) {
            return;
        }
        int wanted = (connection.reads ? SelectionKey.OP_READ : 0)
                | (connection.unwritten.isEmpty() ? 0 : SelectionKey.OP_WRITE);
        if (connection.key.interestOps() != wanted) {
            connection.key.interestOps(wanted);
            selector.wakeup();
        }
    }
}
