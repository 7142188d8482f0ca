// SPDX-License-Identifier: Apache-2.0

package headgate.relay;

import java.util.HashMap;
import java.util.LinkedHashSet;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.concurrent.TimeUnit;
import org.apache.spark.SparkContext;
import org.apache.spark.scheduler.ActiveJob;
import org.apache.spark.scheduler.SparkListenerEvent;
import org.apache.spark.scheduler.SparkListenerJobEnd;
import org.apache.spark.scheduler.SparkListenerJobStart;
import org.apache.spark.scheduler.SparkListenerStageCompleted;
import org.apache.spark.scheduler.SparkListenerStageSubmitted;
import org.apache.spark.scheduler.SparkListenerTaskEnd;
import org.apache.spark.scheduler.SparkListenerTaskStart;
import org.apache.spark.scheduler.StageInfo;
import scala.Product;

/**
 * The relay of one Spark Connect session. It tells of that session's jobs only, carries out commands for them only, and
 * answers those for other jobs as if the jobs did not exist. It ends with the session. It also ends by itself when the
 * sidecar has said nothing for the length of the lease: the client may be dead, and nobody else would take the
 * listener away.
 *
 * Spark Connect gives each job a tag with its user, session and operation, which is in the job's properties. The tags
 * that clients choose begin otherwise. A client can replace all of them in its own jobs, by its setting spark.job.tags,
 * and so give its jobs to another session. It cannot take those of another one: whose relay this is, no property says.
 *
 * Tasks are known by the properties of their task set, and by their stage when that is over. The end of a task may come
 * after the end of its job, so stages are forgotten only when many newer ones are known.
 */
final class SessionRelay extends TaskEventRelay {

    private static final int STAGES_MAX = 10_000;
    private static final int CAPACITY = 10_000;
    private static final String CONNECT = "org.apache.spark.sql.connect.service.";
    static final String TAGS = "spark.job.tags";
    private static final String OPERATION_TAG = "SparkConnect_OperationTag_";

    private final String origin;
    private final long leaseNs;
    private final Set<Integer> jobs = new LinkedHashSet<>();
    private final Set<Integer> stages = new LinkedHashSet<>();
    private volatile long heardNs = System.nanoTime();
    private volatile boolean sessionEnded;

    /** The origin of the session's jobs. */
    SessionRelay(String origin, long leaseMs) {
        this.origin = origin;
        leaseNs = TimeUnit.MILLISECONDS.toNanos(leaseMs);
    }

    /** The user and the session to which a job belongs, as Spark Connect writes them. */
    static String origin(Object userId, Object sessionId) {
        return "_User_" + userId + "_Session_" + sessionId;
    }

    /** The origin of a job, from its properties; null if it is of another kind. */
    static String originOf(Properties job) {
        String tags = job == null ? null : job.getProperty(TAGS);
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

    @Override
    boolean includes(Properties job) {
        return origin.equals(originOf(job));
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
    boolean includesStage(int stageId) {
        if (!knows(stageId)) { // the bus may have dropped the start of its job, or not brought it yet
            scala.collection.Iterator<?> each = activeJobs();
            while (each.hasNext()) {
                includes((ActiveJob) each.next());
            }
        }
        return knows(stageId);
    }

    @Override
    boolean includes(ActiveJob job) {
        if (!includes(job.properties())) {
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
        if (includes(event.properties())) {
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
        if (includes(event.properties())) {
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

    @Override
    public void onOtherEvent(SparkListenerEvent event) {
        Map<String, Object> closed = fieldsOf(event, "SparkListenerConnectSessionClosed");
        if (origin.equals(origin(closed.get("userId"), closed.get("sessionId")))) {
            sessionEnded = true;
        }
    }

    /** The fields of an event of Spark Connect, or none. Not by its class: one that cannot be loaded ends the bus. */
    static Map<String, Object> fieldsOf(SparkListenerEvent event, String kind) {
        Map<String, Object> fields = new HashMap<>();
        if (event.getClass().getName().equals(CONNECT + kind) && event instanceof Product product) {
            for (int i = 0; i < product.productArity(); i++) {
                fields.put(product.productElementName(i), product.productElement(i));
            }
        }
        return fields;
    }

    // ---- the lease -------------------------------------------------------------------------------------------

    @Override
    void heard() {
        heardNs = System.nanoTime();
    }

    @Override
    boolean isOver() {
        return sessionEnded || System.nanoTime() - heardNs > leaseNs;
    }
}
