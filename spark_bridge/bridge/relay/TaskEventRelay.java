// SPDX-License-Identifier: Apache-2.0

package headgate.relay;

import java.io.BufferedInputStream;
import java.io.BufferedOutputStream;
import java.io.ByteArrayOutputStream;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.net.InetSocketAddress;
import java.net.Socket;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Paths;
import java.security.MessageDigest;
import java.security.SecureRandom;
import java.security.cert.CertificateException;
import java.security.cert.X509Certificate;
import java.time.Instant;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.NoSuchElementException;
import java.util.Properties;
import java.util.concurrent.ArrayBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import javax.crypto.Mac;
import javax.crypto.spec.SecretKeySpec;
import javax.net.ssl.SSLContext;
import javax.net.ssl.SSLSocket;
import javax.net.ssl.TrustManager;
import javax.net.ssl.X509TrustManager;

import org.apache.spark.ExceptionFailure;
import org.apache.spark.ExecutorLostFailure;
import org.apache.spark.FetchFailed;
import org.apache.spark.Resubmitted$;
import org.apache.spark.SparkContext;
import org.apache.spark.Success$;
import org.apache.spark.TaskCommitDenied;
import org.apache.spark.TaskEndReason;
import org.apache.spark.TaskFailedReason;
import org.apache.spark.TaskKilled;
import org.apache.spark.scheduler.*;
import org.apache.spark.status.TaskDataWrapper;
import org.apache.spark.storage.RDDInfo;

/**
 * Tells the sidecar, over one loopback connection, what Spark's listener bus says about jobs, stages and tasks,
 * and carries out the few commands that come back. This is old Java (no lambdas, no inferred generics, no
 * try-with-resources), so that a test can compile a variant of it in the JVM, with Spark's own Janino.
 *
 * Three kinds of threads meet here:
 *   - the bus's dispatch thread runs the on... callbacks. It must never wait: a callback builds one byte array and
 *     offers it to a bounded queue. If the queue is full, the record is dropped and counted.
 *   - one writer thread owns the connection: it connects, drains the queue, numbers the records, reports drops.
 *   - one reader thread per connection carries out commands and answers them.
 * A sequence number on each record lets the other side drop what a reconnect sends twice and count what it lost.
 *
 * A sidecar may ask for the facts of only those tasks that run an operator. Which stages do is known when a task of
 * them registers, often after its start. So those of all other stages wait here (HeldFacts) until the sidecar names
 * their stage, or until they cannot matter any more.
 *
 * Nothing here throws into Spark, and nothing stops the SparkContext.
 *
 * A subclass may serve less (`includes`) and end earlier (`isOver`): that of Spark Connect does. What is not included
 * is answered as what does not exist.
 */
public class TaskEventRelay extends SparkListener implements Runnable {

    private static final int VERSION = 11;
    private static final int TEXT_MAX_CHARS = 2000;
    private static final int COMMAND_MAX_BYTES = 1 << 20;
    private static final int BATCH_MAX = 256;
    private static final int HANDSHAKE_TIMEOUT_MS = 5000;
    private static final int CONNECT_TRIES = 8;
    private static final long IDLE_LOOK_MS = 100;
    private static final int HELD_STAGES_MAX = 512;
    private static final int HELD_FACTS_MAX = 50000;
    private static final int REMEMBERED_MAX = 65536;
    private static final String QUEUE = "headgate";

    private final AtomicLong dropped = new AtomicLong();
    private final HeldFacts held = new HeldFacts();
    private final List batch = new ArrayList();
    private SparkContext context;
    private InetSocketAddress address;
    private Credentials credentials;
    private ArrayBlockingQueue queue;
    private Thread writer;
    private com.codahale.metrics.Counter busDrops;
    private long busDropsSeen;
    private long batchSequence = 1;
    private long endedUs;
    private volatile boolean ended;
    private volatile boolean closed;
    private boolean patient;
    private volatile Link link;

    /**
     * Connects in the background; records are kept, up to the capacity, until the connection stands. Patient: a
     * sidecar that is gone may be started again at any time, so this one tries until the context stops. The file holds
     * the credentials; it is read here and not needed afterwards.
     */
    public void open(SparkContext context, String host, int port, String file, int capacity, boolean patient)
            throws IOException {
        connect(context, host, port, Files.readAllBytes(Paths.get(file, new String[0])), capacity, patient);
    }

    /** The same, with the credentials themselves. */
    void connect(SparkContext context, String host, int port, byte[] credentials, int capacity, boolean patient) {
        this.context = context;
        this.patient = patient;
        this.address = new InetSocketAddress(host, port);
        this.credentials = new Credentials(credentials);
        this.queue = new ArrayBlockingQueue(capacity);
        this.writer = new Thread(this, "headgate-relay-writer");
        this.writer.setDaemon(true);
        this.writer.start();
    }

    /** Puts this listener on a separate queue of the bus. It does not see what was posted before. */
    public void attach() {
        LiveListenerBus bus = context.listenerBus();
        busDrops = bus.metrics().metricRegistry().counter("queue." + QUEUE + ".numDroppedEvents");
        busDropsSeen = busDrops.getCount();
        bus.addToQueue(this, QUEUE);
    }

    /** Leaves the bus and ends both threads. Safe to call twice, and after the context has stopped. */
    public void close() {
        closed = true;
        context.listenerBus().removeListener(this);
        Link current = link;
        if (current != null) {
            current.close();
        }
        writer.interrupt();
    }

    // ---- callbacks, on the bus's thread ---------------------------------------------------------------------

    public void onJobStart(SparkListenerJobStart event) {
        try {
            List stageIds = new ArrayList();
            scala.collection.Iterator stages = event.stageInfos().iterator();
            while (stages.hasNext()) {
                stageIds.add(Integer.valueOf(((StageInfo) stages.next()).stageId()));
            }
            jobStarted(event.jobId(), stageIds, event.properties());
        } catch (Throwable failure) {
            dropped.incrementAndGet();
        }
    }

    public void onJobEnd(SparkListenerJobEnd event) {
        try {
            Record record = new Record(2);
            record.out.writeInt(event.jobId());
            boolean failed = event.jobResult() instanceof JobFailed;
            record.out.writeBoolean(!failed);
            record.text(failed ? String.valueOf(((JobFailed) event.jobResult()).exception().getMessage()) : "");
            held.jobEnded(event.jobId());
            submit(record);
        } catch (Throwable failure) {
            dropped.incrementAndGet();
        }
    }

    public void onStageSubmitted(SparkListenerStageSubmitted event) {
        try {
            StageInfo stage = event.stageInfo();
            Record record = new Record(3);
            record.out.writeInt(stage.stageId());
            record.out.writeInt(stage.attemptNumber());
            record.out.writeInt(stage.numTasks());
            boolean barrier = false;
            scala.collection.Iterator rdds = stage.rddInfos().iterator();
            while (!barrier && rdds.hasNext()) {
                barrier = ((RDDInfo) rdds.next()).isBarrier();
            }
            record.out.writeBoolean(barrier);
            record.out.writeInt(stage.rddInfos().isEmpty() ? 0 : ((RDDInfo) stage.rddInfos().head()).numPartitions());
            submit(record);
        } catch (Throwable failure) {
            dropped.incrementAndGet();
        }
    }

    public void onStageCompleted(SparkListenerStageCompleted event) {
        try {
            StageInfo stage = event.stageInfo();
            Record record = new Record(4);
            record.out.writeInt(stage.stageId());
            record.out.writeInt(stage.attemptNumber());
            record.out.writeBoolean(stage.failureReason().isDefined());
            record.text(stage.failureReason().isDefined() ? (String) stage.failureReason().get() : "");
            if (!stage.failureReason().isDefined()) {
                held.forget(stage.stageId());
            }
            submit(record);
        } catch (Throwable failure) {
            dropped.incrementAndGet();
        }
    }

    public void onTaskStart(SparkListenerTaskStart event) {
        try {
            int lost = held.taskStarted(event);
            if (lost < 0) {
                submit(started(event));
            } else if (lost > 0) {
                dropped.addAndGet(lost);
            }
        } catch (Throwable failure) {
            dropped.incrementAndGet();
        }
    }

    public void onTaskEnd(SparkListenerTaskEnd event) {
        try {
            int lost = held.taskEnded(event);
            if (lost < 0) {
                submit(ended(event));
            } else if (lost > 0) {
                dropped.addAndGet(lost);
            }
        } catch (Throwable failure) {
            dropped.incrementAndGet();
        }
    }

    public void onExecutorRemoved(SparkListenerExecutorRemoved event) {
        try {
            Record record = new Record(7);
            record.text(event.executorId());
            record.text(event.reason());
            held.executorRemoved(event.executorId(), record.bytes());
            submit(record);
        } catch (Throwable failure) {
            dropped.incrementAndGet();
        }
    }

    /** Not queued: it is the last word, so the writer says it once the queue is empty, and then ends. */
    public void onApplicationEnd(SparkListenerApplicationEnd event) {
        endedUs = nowUs();
        ended = true;
    }

    private void jobStarted(int jobId, List stageIds, Properties properties) throws IOException {
        held.jobStarted(jobId, stageIds);
        Record record = new Record(1);
        record.out.writeInt(jobId);
        record.out.writeInt(stageIds.size());
        for (int i = 0; i < stageIds.size(); i++) {
            record.out.writeInt(((Integer) stageIds.get(i)).intValue());
        }
        record.text(actionOf(properties));
        submit(record);
    }

    /** The call of the driver to which a job belongs, by a local property or, with Spark Connect, by a tag. */
    private static String actionOf(Properties properties) {
        String action = properties == null ? "" : properties.getProperty("headgate.action", "");
        String tags = properties == null ? "" : properties.getProperty("spark.job.tags", "");
        String mark = "_Tag_headgate.action.";
        int at = tags.indexOf(mark);
        if (action.length() > 0 || at < 0) {
            return action;
        }
        int end = tags.indexOf(',', at);
        return tags.substring(at + mark.length(), end < 0 ? tags.length() : end);
    }

    static Record started(SparkListenerTaskStart event) throws IOException {
        TaskInfo task = event.taskInfo();
        Record record = new Record(5);
        record.task(task, event.stageId(), event.stageAttemptId());
        record.out.writeBoolean(task.speculative());
        record.text(task.executorId());
        record.text(task.host());
        return record;
    }

    static Record ended(SparkListenerTaskEnd event) throws IOException {
        Record record = new Record(6);
        record.task(event.taskInfo(), event.stageId(), event.stageAttemptId());
        record.outcome(event.reason());
        return record;
    }

    private void submit(Record record) {
        if (!queue.offer(record.bytes())) {
            dropped.incrementAndGet();
        }
    }

    /** Hands over what was held of a stage, before anything that the bus brings of it from now on. */
    private void watch(int stageId, long taskId) throws IOException {
        synchronized (held) {
            List released = held.watch(stageId, taskId);
            if (!released.isEmpty() && !queue.offer(released)) { // one place in the queue, however many they are
                dropped.addAndGet(released.size());
            }
        }
    }

    /** Whether the sidecar may ask about a job with these properties, and command it. Null: they are not known. */
    boolean includes(Properties job) {
        return true;
    }

    /** The same of an active job. */
    boolean includes(ActiveJob job) {
        return includes(job.properties());
    }

    /** Whether the sidecar may ask about this stage, which may have ended. */
    boolean includesStage(int stageId) {
        return true;
    }

    /** Whether this relay is to end although the application goes on. */
    boolean isOver() {
        return false;
    }

    /** The sidecar has proved who it is, or has said something. On the writer thread or a reader's. */
    void heard() {
    }

    // ---- the writer thread ----------------------------------------------------------------------------------

    public void run() {
        int failures = 0;
        while (!closed && !isOver() && (failures < CONNECT_TRIES || patient && !ended)) {
            Link current = null;
            try {
                current = new Link(this, address, credentials);
                failures = 0;
                heard();
                link = current;
                pump(current);
            } catch (Exception failure) {
                failures++;
            } finally {
                if (current != null) {
                    current.close();
                }
            }
            if (!closed) {
                try {
                    Thread.sleep(Math.min(2000L, 25L << Math.min(failures, 10)));
                } catch (InterruptedException wakened) {
                    // close() wakes us; the loop looks at closed
                }
            }
        }
        // Nobody listens any more: leave the bus, so that Spark does not carry a listener for nothing.
        closed = true;
        try {
            context.listenerBus().removeListener(this);
        } catch (Throwable gone) {
            // the context is being torn down; there is nothing left to leave
        }
    }

    private void pump(Link current) throws Exception {
        while (!closed && !isOver() && !current.broken) {
            boolean last = false;
            if (batch.isEmpty()) {
                Object first = queue.poll(IDLE_LOOK_MS, TimeUnit.MILLISECONDS);
                for (Object next = first; next != null; next = batch.size() < BATCH_MAX ? queue.poll() : null) {
                    if (next instanceof List) {
                        batch.addAll((List) next);
                    } else {
                        batch.add(next);
                    }
                }
                addDropReport();
                if (ended && queue.isEmpty()) {
                    batch.add(new Record(9, endedUs).bytes());
                }
            }
            if (!batch.isEmpty()) {
                last = ((byte[]) batch.get(batch.size() - 1))[0] == 9;
                current.sendRecords(batch, batchSequence);
                batchSequence += batch.size();
                batch.clear(); // only now: after a failure the same records go out again under the same numbers
            }
            closed = closed || last;
        }
    }

    private void addDropReport() throws IOException {
        long count = dropped.getAndSet(0);
        if (busDrops != null) {
            long now = busDrops.getCount();
            count += now - busDropsSeen;
            busDropsSeen = now;
        }
        if (count > 0) {
            Record record = new Record(8);
            record.out.writeLong(count);
            batch.add(record.bytes());
        }
    }

    static long nowUs() {
        Instant now = Instant.now();
        return now.getEpochSecond() * 1000000L + now.getNano() / 1000;
    }

    // ---- commands, on a reader thread -----------------------------------------------------------------------

    /** Carries out one command and returns its answer. A command that fails is answered too. */
    Record perform(DataInputStream in) throws IOException {
        int operation = in.readUnsignedByte();
        long requestId = in.readLong();
        try {
            if (isOver()) {
                throw new IllegalStateException("the session has ended");
            }
            heard();
            if (operation == 3) {
                tellActiveJobs();
                return queryStatus(requestId, in);
            }
            if (operation == 5) {
                return activeStages(requestId);
            }
            if (operation == 6) {
                return lookAtStage(requestId, in.readInt());
            }
            if (operation == 1) {
                killTask(in.readLong(), in.readInt(), in.readInt(), readText(in));
            } else if (operation == 2) {
                cancelJob(in.readInt(), readText(in));
            } else if (operation == 7) {
                watch(in.readInt(), in.readLong());
            } else if (operation == 8) {
                held.begin();
            } else if (operation == 9) {
                closed = true; // the writer sees it, and takes this listener off the bus
            } else if (operation != 4) {
                throw new IOException("unknown command " + operation);
            }
            return answer(requestId, true, "");
        } catch (Throwable failure) {
            return answer(requestId, false, String.valueOf(failure));
        }
    }

    private static Record answer(long requestId, boolean done, String problem) throws IOException {
        Record record = new Record(10);
        record.out.writeLong(requestId);
        record.out.writeBoolean(done);
        record.text(problem);
        return record;
    }

    private static String readText(DataInputStream in) throws IOException {
        byte[] text = new byte[in.readUnsignedShort()];
        in.readFully(text);
        return new String(text, StandardCharsets.UTF_8);
    }

    private Record queryStatus(long requestId, DataInputStream in) throws IOException {
        Record record = new Record(11);
        record.out.writeLong(requestId);
        int jobs = in.readInt();
        record.out.writeInt(jobs);
        for (int i = 0; i < jobs; i++) {
            int jobId = in.readInt();
            record.out.writeInt(jobId);
            record.out.writeBoolean(jobIsActive(jobId));
        }
        int tasks = in.readInt();
        record.out.writeInt(tasks);
        for (int i = 0; i < tasks; i++) {
            long taskId = in.readLong();
            record.out.writeLong(taskId);
            int[] known = taskState(taskId);
            record.out.writeByte(known[0]);
            if (known[0] != 3) {
                record.out.writeInt(known[1]);
                record.out.writeInt(known[2]);
            }
        }
        return record;
    }

    /** For a sidecar that takes over: every stage of each active job, and how many of its tasks have succeeded. */
    private Record activeStages(long requestId) throws IOException {
        List rows = new ArrayList();
        scala.collection.Iterator jobs = activeJobs();
        while (jobs.hasNext()) {
            ActiveJob job = (ActiveJob) jobs.next();
            Integer jobId = Integer.valueOf(job.jobId());
            if (!includes(job)) {
                continue;
            }
            scala.collection.Iterator stages = stagesOf(jobId);
            while (stages.hasNext()) {
                Integer stageId = (Integer) stages.next();
                Stage stage = (Stage) context.dagScheduler().stageIdToStage().apply(stageId);
                int succeeded = stage.numPartitions() - stage.findMissingPartitions().size();
                rows.add(new int[] {jobId.intValue(), stageId.intValue(), succeeded});
            }
        }
        Record record = new Record(12);
        record.out.writeLong(requestId);
        record.out.writeInt(rows.size());
        for (int i = 0; i < rows.size(); i++) {
            int[] row = (int[]) rows.get(i);
            record.out.writeInt(row[0]);
            record.out.writeInt(row[1]);
            record.out.writeInt(row[2]);
        }
        return record;
    }

    /** Which partitions a stage computes, what Spark may keep of its results, and of what it has a part already. */
    private Record lookAtStage(long requestId, int stageId) throws IOException {
        Record record = new Record(13);
        record.out.writeLong(requestId);
        scala.Option found = scala.Option.empty();
        boolean included = includesStage(stageId);
        for (int look = 0; included && look < 3 && found.isEmpty(); look++) { // see jobIsActive
            found = context.dagScheduler().stageIdToStage().get(Integer.valueOf(stageId));
        }
        java.util.TreeSet partitions = new java.util.TreeSet();
        java.util.TreeSet outputs = new java.util.TreeSet();
        java.util.TreeSet kept = new java.util.TreeSet();
        int count = 0;
        if (found.isDefined()) {
            Stage stage = (Stage) found.get();
            count = stage.rdd().getNumPartitions();
            if (stage instanceof ShuffleMapStage) {
                scala.collection.Iterator missing = stage.findMissingPartitions().iterator();
                while (missing.hasNext()) {
                    partitions.add(missing.next());
                }
                Integer shuffle = Integer.valueOf(-1 - ((ShuffleMapStage) stage).shuffleDep().shuffleId());
                outputs.add(shuffle);
                if (partitions.size() < count) {
                    kept.add(shuffle);
                }
            } else {
                int[] wanted = ((ResultStage) stage).partitions();
                for (int i = 0; i < wanted.length; i++) {
                    partitions.add(Integer.valueOf(wanted[i]));
                }
            }
            boolean persisted = false;
            scala.collection.Iterator rdds = stage.latestInfo().rddInfos().iterator();
            while (rdds.hasNext()) {
                RDDInfo rdd = (RDDInfo) rdds.next();
                if (rdd.storageLevel().isValid()) {
                    persisted = true;
                    outputs.add(Integer.valueOf(rdd.id()));
                }
            }
            RDDInfo[] stored = persisted ? context.getRDDStorageInfo() : new RDDInfo[0];
            for (int i = 0; i < stored.length; i++) {
                Integer id = Integer.valueOf(stored[i].id());
                int there = stored[i].numCachedPartitions();
                if (outputs.contains(id) && there > 0 && there < stored[i].numPartitions()) {
                    kept.add(id);
                }
            }
        }
        record.out.writeInt(count);
        record.ints(partitions);
        record.ints(outputs);
        record.ints(kept);
        return record;
    }

    scala.collection.Iterator activeJobs() {
        return context.dagScheduler().jobIdToActiveJob().valuesIterator();
    }

    scala.collection.Iterator stagesOf(Integer jobId) {
        return ((scala.collection.mutable.HashSet) context.dagScheduler().jobIdToStageIds().apply(jobId)).iterator();
    }

    /** Report each active job, perhaps again, before a look: the bus may have dropped its start. */
    private void tellActiveJobs() {
        try {
            scala.collection.Iterator jobs = activeJobs();
            while (jobs.hasNext()) {
                ActiveJob job = (ActiveJob) jobs.next();
                Integer jobId = Integer.valueOf(job.jobId());
                if (!includes(job)) {
                    continue;
                }
                List stageIds = new ArrayList();
                scala.collection.Iterator stages = stagesOf(jobId);
                while (stages.hasNext()) {
                    stageIds.add(stages.next());
                }
                jobStarted(jobId.intValue(), stageIds, job.properties());
            }
        } catch (Throwable changing) {
            // the scheduler's thread has changed the tables meanwhile; the next look will find them
        }
    }

    /**
     * The scheduler's own table, which is ahead of the bus. Its thread changes the table without a lock, and a
     * lookup during a resize can miss an entry, so an absence counts only if it is seen three times in a row.
     */
    private boolean jobIsActive(int jobId) {
        for (int look = 0; look < 3; look++) {
            scala.Option found = context.dagScheduler().jobIdToActiveJob().get(Integer.valueOf(jobId));
            if (found.isDefined()) {
                return includes((ActiveJob) found.get());
            }
            Thread.yield();
        }
        return false;
    }

    private void cancelJob(int jobId, String reason) {
        if (includes((Properties) null) || jobIsActive(jobId)) {
            context.cancelJob(jobId, reason);
        }
    }

    /** Kills a task, but only the one of this stage and partition: a peer may have named another one's id. */
    private void killTask(long taskId, int stageId, int partition, String reason) {
        int[] known = scheduledTask(taskId);
        if (known == null ? includes((Properties) null) : stageId < 0 || known[1] == stageId && known[2] == partition) {
            context.killTaskAttempt(taskId, true, reason);
        }
    }

    /** State, stage and partition of a task in the task sets that Spark is working on, or null. */
    private int[] scheduledTask(long taskId) {
        if (!(context.taskScheduler() instanceof TaskSchedulerImpl)) {
            return null;
        }
        TaskSchedulerImpl scheduler = (TaskSchedulerImpl) context.taskScheduler();
        synchronized (scheduler) { // the lock that guards the task sets
            TaskSetManager place = findTask(scheduler.rootPool(), taskId);
            if (place == null || !includes(place.taskSet().properties())) { // those of the job, as Spark has them
                return null;
            }
            TaskInfo task = (TaskInfo) place.taskInfos().apply(Long.valueOf(taskId));
            int state = !task.finished() ? 0 : task.successful() ? 1 : 2;
            return new int[] {state, place.stageId(), task.partitionId()};
        }
    }

    /**
     * 0 running, 1 succeeded, 2 ended, each with stage and partition, or 3 unknown: from the task sets that Spark is
     * working on, else its store.
     */
    private int[] taskState(long taskId) {
        int[] known = scheduledTask(taskId);
        if (known != null) {
            return known;
        }
        // The task set is over. The store follows the bus and may be behind, so a "RUNNING" of its says nothing.
        try {
            TaskDataWrapper data = (TaskDataWrapper) context.statusStore().store()
                .read(TaskDataWrapper.class, Long.valueOf(taskId));
            String status = data.status();
            if (!includesStage(data.stageId())) {
                return new int[] {3};
            }
            int state = "SUCCESS".equals(status) ? 1 : "FAILED".equals(status) || "KILLED".equals(status) ? 2 : 3;
            return new int[] {state, data.stageId(), data.partitionId()};
        } catch (Throwable absent) {
            return new int[] {3};
        }
    }

    /** Not getSortedTaskSetQueue(): that leaves out the sets which have nothing more to launch. */
    private static TaskSetManager findTask(Schedulable place, long taskId) {
        if (place instanceof TaskSetManager) {
            TaskSetManager tasks = (TaskSetManager) place;
            return tasks.taskInfos().contains(Long.valueOf(taskId)) ? tasks : null;
        }
        TaskSetManager found = null;
        java.util.Iterator inside = place.schedulableQueue().iterator();
        while (found == null && inside.hasNext()) {
            found = findTask((Schedulable) inside.next(), taskId);
        }
        return found;
    }

    // ---- facts that wait ------------------------------------------------------------------------------------

    /**
     * The starts and ends of tasks in stages that nobody watches, in the bus's order. Kept as the sidecar would keep
     * them: not those of a task that has succeeded, nor those of a stage that has completed, or whose jobs have ended.
     * Bounded; the oldest stage goes first, and what goes counts as lost. Each method may be called by any thread.
     */
    static final class HeldFacts {
        private boolean holding;
        private int count;
        private final LinkedHashMap stages = new LinkedHashMap(); // stage id -> (task id, ... -> its event or record)
        private final LinkedHashMap jobs = new LinkedHashMap(); // job id -> List of its stages' ids
        private final LinkedHashMap watched = new LinkedHashMap(); // the ids of stages
        private final LinkedHashMap claimed = new LinkedHashMap(); // the ids of tasks whose place the sidecar must learn

        /** Holds facts back from now on. Before, all are passed on. */
        synchronized void begin() {
            holding = true;
        }

        synchronized void jobStarted(int jobId, List stageIds) {
            remember(jobs, Integer.valueOf(jobId), stageIds);
        }

        synchronized void jobEnded(int jobId) {
            List ended = (List) jobs.remove(Integer.valueOf(jobId));
            for (int i = 0; ended != null && i < ended.size(); i++) {
                boolean needed = false;
                java.util.Iterator others = jobs.values().iterator();
                while (!needed && others.hasNext()) {
                    needed = ((List) others.next()).contains(ended.get(i));
                }
                if (!needed) {
                    watched.remove(ended.get(i));
                    forget(((Integer) ended.get(i)).intValue());
                }
            }
        }

        synchronized int forget(int stageId) {
            Map facts = (Map) stages.remove(Integer.valueOf(stageId));
            int size = facts == null ? 0 : facts.size();
            count -= size;
            return size;
        }

        /** Keeps the fact, and returns how many others it has displaced; or -1 if it is to be passed on. */
        synchronized int taskStarted(SparkListenerTaskStart event) {
            Long taskId = Long.valueOf(event.taskInfo().taskId());
            return passesOn(event.stageId(), taskId) ? -1 : keep(event.stageId(), taskId, event);
        }

        /** As taskStarted. Nothing is kept of a task that has succeeded. */
        synchronized int taskEnded(SparkListenerTaskEnd event) throws IOException {
            Long taskId = Long.valueOf(event.taskInfo().taskId());
            if (passesOn(event.stageId(), taskId)) {
                return -1;
            }
            Map facts = (Map) stages.get(Integer.valueOf(event.stageId()));
            if (event.reason() == Success$.MODULE$) {
                if (facts != null && facts.remove(taskId) != null) {
                    count--;
                }
                return 0;
            }
            Object start = facts == null ? null : facts.get(taskId);
            if (start instanceof SparkListenerTaskStart) { // it would keep what Spark has measured of the task
                facts.put(taskId, started((SparkListenerTaskStart) start).bytes());
            }
            return keep(event.stageId(), endOf(taskId), ended(event).bytes());
        }

        /** Passed on in any case; and again with the held facts of each stage, as it may have ended their tasks. */
        synchronized void executorRemoved(String executorId, byte[] record) {
            java.util.Iterator each = stages.values().iterator();
            while (each.hasNext()) {
                count += ((Map) each.next()).put(executorId, record) == null ? 1 : 0;
            }
        }

        /** Passes on the stage's facts from now on, and those of this task wherever it runs. Returns what was held. */
        synchronized List watch(int stageId, long taskId) throws IOException {
            List released = new ArrayList();
            Map facts = (Map) stages.get(Integer.valueOf(stageId));
            boolean located = facts != null && facts.containsKey(Long.valueOf(taskId));
            if (facts != null) {
                java.util.Iterator each = facts.values().iterator();
                while (each.hasNext()) {
                    release(each.next(), released);
                }
                forget(stageId);
            }
            remember(watched, Integer.valueOf(stageId), Boolean.TRUE);
            java.util.Iterator others = stages.values().iterator();
            while (!located && others.hasNext()) { // a peer may have named the id of another stage's task
                Map other = (Map) others.next();
                located = other.containsKey(Long.valueOf(taskId));
                release(other.get(Long.valueOf(taskId)), released);
                release(other.get(endOf(Long.valueOf(taskId))), released);
            }
            if (!located) {
                remember(claimed, Long.valueOf(taskId), Boolean.TRUE);
            }
            return released;
        }

        private boolean passesOn(int stageId, Long taskId) {
            return !holding || claimed.remove(taskId) != null || watched.containsKey(Integer.valueOf(stageId));
        }

        private static Long endOf(Long taskId) {
            return Long.valueOf(-1 - taskId.longValue());
        }

        private int keep(int stageId, Long key, Object fact) {
            Map facts = (Map) stages.get(Integer.valueOf(stageId));
            if (facts == null) {
                facts = new LinkedHashMap();
                stages.put(Integer.valueOf(stageId), facts);
            }
            count += facts.put(key, fact) == null ? 1 : 0;
            int lost = 0;
            while (stages.size() > HELD_STAGES_MAX || count > HELD_FACTS_MAX) {
                lost += forget(((Integer) stages.keySet().iterator().next()).intValue());
            }
            return lost;
        }

        private static void release(Object fact, List released) throws IOException {
            if (fact instanceof SparkListenerTaskStart) {
                released.add(started((SparkListenerTaskStart) fact).bytes());
            } else if (fact != null) {
                released.add(fact);
            }
        }

        private static void remember(LinkedHashMap ids, Object id, Object value) {
            ids.remove(id);
            ids.put(id, value);
            if (ids.size() > REMEMBERED_MAX) {
                ids.remove(ids.keySet().iterator().next());
            }
        }
    }

    // ---- one record -----------------------------------------------------------------------------------------

    static final class Record {
        private final ByteArrayOutputStream bytes = new ByteArrayOutputStream(128);
        final DataOutputStream out = new DataOutputStream(bytes);

        Record(int kind) throws IOException {
            this(kind, nowUs());
        }

        Record(int kind, long callbackUs) throws IOException {
            out.writeByte(kind);
            out.writeLong(callbackUs);
        }

        void text(String text) throws IOException {
            String shown = text == null ? "" : text;
            if (shown.length() > TEXT_MAX_CHARS) { // a Python traceback says most at its end
                shown = shown.substring(0, 500) + " ... " + shown.substring(shown.length() - (TEXT_MAX_CHARS - 505));
            }
            byte[] encoded = shown.getBytes(StandardCharsets.UTF_8);
            out.writeShort(encoded.length);
            out.write(encoded);
        }

        void ints(java.util.Set ids) throws IOException {
            out.writeInt(ids.size());
            java.util.Iterator each = ids.iterator();
            while (each.hasNext()) {
                out.writeInt(((Integer) each.next()).intValue());
            }
        }

        void task(TaskInfo task, int stageId, int stageAttempt) throws IOException {
            out.writeLong(task.taskId());
            out.writeInt(stageId);
            out.writeInt(stageAttempt);
            out.writeInt(task.partitionId()); // not index(): that is the place in the task set
            out.writeInt(task.attemptNumber());
        }

        void outcome(TaskEndReason reason) throws IOException {
            int code = 1;
            String message = "";
            if (reason == Success$.MODULE$) {
                code = 0;
            } else if (reason instanceof TaskKilled) {
                code = 2;
                message = ((TaskKilled) reason).reason();
            } else if (reason == Resubmitted$.MODULE$) {
                code = 3;
                message = Resubmitted$.MODULE$.toErrorString();
            } else if (reason instanceof ExecutorLostFailure) {
                code = 4;
                message = ((ExecutorLostFailure) reason).toErrorString();
            } else if (reason instanceof FetchFailed) {
                code = 5;
                message = ((FetchFailed) reason).message();
            } else if (reason instanceof TaskCommitDenied) {
                code = 6;
                message = ((TaskCommitDenied) reason).toErrorString();
            } else if (reason instanceof ExceptionFailure) {
                message = ((ExceptionFailure) reason).description();
            } else if (reason instanceof TaskFailedReason) {
                message = ((TaskFailedReason) reason).toErrorString();
            }
            out.writeByte(code);
            text(message);
        }

        byte[] bytes() {
            return bytes.toByteArray();
        }
    }

    // ---- one connection -------------------------------------------------------------------------------------

    /** What this end proves, and how it recognizes the other one: identity, key, digest of the certificate or none. */
    static final class Credentials {
        final byte[] identity;
        final byte[] key;
        final byte[] certificateDigest;

        Credentials(byte[] bytes) {
            identity = Arrays.copyOfRange(bytes, 0, 16);
            key = Arrays.copyOfRange(bytes, 16, 48);
            certificateDigest = Arrays.copyOfRange(bytes, 48, bytes.length);
        }

        boolean encrypts() {
            return certificateDigest.length > 0;
        }
    }

    /** Accepts one certificate, by its digest, whatever its name, dates and issuer. */
    static final class Pin implements X509TrustManager {
        private final byte[] digest;

        Pin(byte[] digest) {
            this.digest = digest;
        }

        public void checkClientTrusted(X509Certificate[] chain, String kind) throws CertificateException {
            throw new CertificateException("this end is not a server");
        }

        public void checkServerTrusted(X509Certificate[] chain, String kind) throws CertificateException {
            byte[] theirs;
            try {
                theirs = MessageDigest.getInstance("SHA-256").digest(chain[0].getEncoded());
            } catch (java.security.NoSuchAlgorithmException impossible) {
                throw new CertificateException(impossible);
            }
            if (!MessageDigest.isEqual(digest, theirs)) {
                throw new CertificateException("the sidecar has another certificate");
            }
        }

        public X509Certificate[] getAcceptedIssuers() {
            return new X509Certificate[0];
        }
    }

    static final class Link implements Runnable {
        private final TaskEventRelay relay;
        private final Socket socket;
        private final DataInputStream in;
        private final DataOutputStream out;
        volatile boolean broken;

        /** Connects and proves, both ways, that the two ends know the key; throws if anything is wrong. */
        Link(TaskEventRelay relay, InetSocketAddress address, Credentials credentials) throws Exception {
            this.relay = relay;
            Socket plain = new Socket();
            Socket used = plain;
            try {
                plain.connect(address, HANDSHAKE_TIMEOUT_MS);
                plain.setTcpNoDelay(true);
                plain.setSoTimeout(HANDSHAKE_TIMEOUT_MS);
                if (credentials.encrypts()) {
                    used = encrypted(plain, address, credentials.certificateDigest);
                }
            } catch (Exception failure) {
                plain.close();
                throw failure;
            }
            socket = used;
            try {
                in = new DataInputStream(new BufferedInputStream(socket.getInputStream()));
                out = new DataOutputStream(new BufferedOutputStream(socket.getOutputStream(), 1 << 16));
                shakeHands(credentials);
                socket.setSoTimeout(0);
            } catch (Exception failure) {
                close();
                throw failure;
            }
            Thread reader = new Thread(this, "headgate-relay-reader");
            reader.setDaemon(true);
            reader.start();
        }

        private static Socket encrypted(Socket plain, InetSocketAddress address, byte[] digest) throws Exception {
            SSLContext context = SSLContext.getInstance("TLSv1.3");
            context.init(null, new TrustManager[] {new Pin(digest)}, null);
            SSLSocket socket = (SSLSocket) context.getSocketFactory()
                    .createSocket(plain, address.getHostString(), address.getPort(), true);
            socket.setEnabledProtocols(new String[] {"TLSv1.3"});
            socket.startHandshake();
            return socket;
        }

        private void shakeHands(Credentials credentials) throws Exception {
            byte[] key = credentials.key;
            byte[] identity = credentials.identity;
            byte[] magic = "HDGT".getBytes(StandardCharsets.US_ASCII);
            byte[] ours = new byte[32];
            new SecureRandom().nextBytes(ours);
            out.write(magic);
            out.writeShort(VERSION);
            out.write(identity);
            out.write(ours);
            out.flush();
            byte[] theirMagic = new byte[4];
            in.readFully(theirMagic);
            int version = in.readUnsignedShort();
            if (!MessageDigest.isEqual(magic, theirMagic) || version != VERSION) {
                throw new IOException("not a headgate sidecar of version " + VERSION + " (" + version + ")");
            }
            byte[] theirs = new byte[32];
            in.readFully(theirs);
            out.write(proof(key, "headgate-client", identity, ours, theirs));
            out.flush();
            byte[] theirProof = new byte[32];
            in.readFully(theirProof);
            if (!MessageDigest.isEqual(theirProof, proof(key, "headgate-server", identity, ours, theirs))) {
                throw new IOException("the sidecar does not know the key");
            }
        }

        private static byte[] proof(byte[] key, String label, byte[] identity, byte[] ours, byte[] theirs)
                throws Exception {
            Mac mac = Mac.getInstance("HmacSHA256");
            mac.init(new SecretKeySpec(key, "HmacSHA256"));
            mac.update(label.getBytes(StandardCharsets.US_ASCII));
            mac.update(new byte[] {(byte) (VERSION >> 8), (byte) VERSION});
            mac.update(identity);
            mac.update(ours);
            mac.update(theirs);
            return mac.doFinal();
        }

        synchronized void sendRecords(List records, long firstSequence) throws IOException {
            for (int i = 0; i < records.size(); i++) {
                send(firstSequence + i, (byte[]) records.get(i));
            }
            out.flush();
        }

        synchronized void sendAnswer(Record answer) throws IOException {
            send(0L, answer.bytes()); // answers are outside the numbering: they may overtake records
            out.flush();
        }

        private void send(long sequence, byte[] body) throws IOException {
            out.writeInt(8 + body.length);
            out.writeLong(sequence);
            out.write(body);
        }

        public void run() {
            try {
                while (!broken) {
                    int length = in.readInt();
                    if (length < 9 || length > COMMAND_MAX_BYTES) {
                        throw new IOException("a command of " + length + " bytes");
                    }
                    byte[] body = new byte[length];
                    in.readFully(body);
                    sendAnswer(relay.perform(new DataInputStream(new java.io.ByteArrayInputStream(body))));
                }
            } catch (Throwable failure) {
                close();
            }
        }

        void close() {
            broken = true;
            try {
                socket.close();
            } catch (IOException ignored) {
                // it is closed for us
            }
        }
    }
}
