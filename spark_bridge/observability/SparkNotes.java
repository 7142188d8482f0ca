// SPDX-License-Identifier: Apache-2.0

package headgate.observability;

import org.apache.spark.SparkContext;
import org.apache.spark.scheduler.SparkListenerEvent;

/**
 * Writes the sidecar's notes into Spark's event log: Spark logs every event of its listener bus as JSON, from the
 * getters of its class. Compiled by Janino inside the driver's JVM, so this is old Java.
 */
public final class SparkNotes {

    /** What happened within about a second. A History Server does not know this class, and skips the event. */
    public static final class Notes implements SparkListenerEvent {
        private final String notes;

        public Notes(String notes) {
            this.notes = notes;
        }

        /** A JSON array of objects, as text. */
        public String getNotes() {
            return notes;
        }
    }

    private SparkContext context;

    /** Returns whether the application has an event log. */
    public boolean open(SparkContext context) {
        this.context = context;
        return context.eventLogDir().isDefined();
    }

    public void post(String notes) {
        if (!context.isStopped()) {
            context.listenerBus().post(new Notes(notes));
        }
    }
}
