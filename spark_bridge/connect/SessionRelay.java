// SPDX-License-Identifier: Apache-2.0

package headgate.relay;

import java.util.LinkedHashSet;
import java.util.Properties;
import java.util.Set;
import java.util.concurrent.TimeUnit;
import org.apache.spark.SparkContext;
import org.apache.spark.scheduler.ActiveJob;
import org.apache.spark.scheduler.SparkListenerJobEnd;
import org.apache.spark.scheduler.SparkListenerJobStart;
import org.apache.spark.scheduler.SparkListenerStageCompleted;
import org.apache.spark.scheduler.SparkListenerStageSubmitted;
import org.apache.spark.scheduler.SparkListenerTaskEnd;
import org.apache.spark.scheduler.SparkListenerTaskStart;
import org.apache.spark.scheduler.StageInfo;

/**
 * The relay of one Spark Connect session. It tells of that session's jobs only, and it ends by itself when the sidecar
 * has said nothing for the length of the lease: the client may be dead, and nobody else would take the listener away.
 *
 * Spark Connect gives each job a tag with its user, session and operation, which is in the job's local properties. The
 * tags that clients choose begin otherwise, so nobody can give his jobs to another session. Tasks are known by their
 * stage. The end of a task may come after the end of its job, so stages are forgotten only
 * when many newer ones are known.
 */
final class SessionRelay extends TaskEventRelay {

    private static final int STAGES_MAX = 10_000;
    private static final int CAPACITY = 10_000;
    private static final String OPERATION_TAG = "SparkConnect_OperationTag_";

    private final String origin;
    private final long leaseNs;
    private final Set<Integer> jobs = new LinkedHashSet<>();
    private final Set<Integer> stages = new LinkedHashSet<>();
    private volatile long heardNs = System.nanoTime();

    /** The origin of the session's jobs, or how it ends. */
    SessionRelay(String origin, long leaseMs) {
        this.origin = origin;
        leaseNs = TimeUnit.MILLISECONDS.toNanos(leaseMs);
    }

    /** How the origin of a session's jobs ends, for any user. */
    static String endOfOrigin(String sessionId) {
        return "_Session_" + sessionId;
    }

    /** The user and the session to which a job belongs, as Spark Connect writes them; null if it is of another kind. */
    static String originOf(Properties job) {
        String tags = job == null ? null : job.getProperty("spark.job.tags");
        if (tags != null) {
            for (String tag : tags.split(",")) {
                int end = tag.lastIndexOf("_Operation_"); // an operation's id has none
                if (tag.startsWith(OPERATION_TAG) && end > 0) {
                    return tag.substring(OPERATION_TAG.length() - 1, end);
                }
            }
        }
        return null;
    }

    void begin(SparkContext context, String host, int port, byte[] credentials) {
        connect(context, host, port, credentials, CAPACITY, true);
        attach();
    }

    // ---- what is told: on the bus's thread, and on a reader's for a look --------------------------------------

    private boolean isOurs(Properties job) {
        String found = originOf(job);
        return found != null && found.endsWith(origin);
    }

    private synchronized void learn(int stageId) {
        stages.add(stageId);
        if (stages.size() > STAGES_MAX) {
            stages.remove(stages.iterator().next());
        }
    }

    private synchronized boolean knows(int stageId) {
        return stages.contains(stageId);
    }

    private synchronized void learnJob(int jobId) {
        jobs.add(jobId);
    }

    private synchronized boolean forgetJob(int jobId) {
        return jobs.remove(jobId);
    }

    @Override
    boolean includes(ActiveJob job) {
        if (!isOurs(job.properties())) {
            return false;
        }
        learnJob(job.jobId());
        scala.collection.Iterator<?> each = stagesOf(job.jobId());
        while (each.hasNext()) {
            learn((Integer) each.next());
        }
        return true;
    }

    @Override
    public void onJobStart(SparkListenerJobStart event) {
        if (isOurs(event.properties())) {
            learnJob(event.jobId());
            scala.collection.Iterator<StageInfo> each = event.stageInfos().iterator();
            while (each.hasNext()) {
                learn(each.next().stageId());
            }
            super.onJobStart(event);
        }
    }

    @Override
    public void onJobEnd(SparkListenerJobEnd event) {
        if (forgetJob(event.jobId())) {
            super.onJobEnd(event);
        }
    }

    @Override
    public void onStageSubmitted(SparkListenerStageSubmitted event) {
        if (isOurs(event.properties())) {
            learn(event.stageInfo().stageId());
            super.onStageSubmitted(event);
        }
    }

    @Override
    public void onStageCompleted(SparkListenerStageCompleted event) {
        if (knows(event.stageInfo().stageId())) {
            super.onStageCompleted(event);
        }
    }

    @Override
    public void onTaskStart(SparkListenerTaskStart event) {
        if (knows(event.stageId())) {
            super.onTaskStart(event);
        }
    }

    @Override
    public void onTaskEnd(SparkListenerTaskEnd event) {
        if (knows(event.stageId())) {
            super.onTaskEnd(event);
        }
    }

    // ---- the lease -------------------------------------------------------------------------------------------

    @Override
    void heard() {
        heardNs = System.nanoTime();
    }

    @Override
    boolean isOver() {
        return System.nanoTime() - heardNs > leaseNs;
    }
}
