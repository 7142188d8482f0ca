// SPDX-License-Identifier: Apache-2.0

package headgate.observability;

import java.nio.ByteBuffer;
import java.util.HashMap;
import java.util.HashSet;
import java.util.Iterator;
import java.util.Map;
import java.util.Set;

import com.codahale.metrics.Gauge;
import com.codahale.metrics.MetricRegistry;

import org.apache.spark.SparkContext;

/**
 * The sidecar's figures as gauges in one of Spark's own metric registries, so that every sink of Spark gets them. A
 * gauge returns what the sidecar has published last; reading one asks nobody.
 *
 * Compiled by Janino inside the driver's JVM, so this is old Java. The sidecar's threads call publish and close, the
 * threads of Spark's sinks read the gauges.
 */
public final class SparkGauges {

    /** The newest value of one figure. */
    public static final class Figure implements Gauge {
        private volatile double value;

        public Object getValue() {
            return Double.valueOf(value);
        }
    }

    private final Map figures = new HashMap();
    private MetricRegistry registry;
    private boolean closed;

    /** Chooses the registry, which is a part of Spark's metrics system for as long as the context lives. */
    public void open(SparkContext context) {
        registry = context.listenerBus().metrics().metricRegistry();
    }

    /**
     * Replaces all figures: names are separated by line feeds, values are doubles in the same order. New names are
     * registered, and those that are missing are removed. A name that somebody else has registered is left to them.
     */
    public synchronized void publish(String names, byte[] values) {
        if (closed) {
            return;
        }
        String[] named = names.length() == 0 ? new String[0] : names.split("\n");
        ByteBuffer buffer = ByteBuffer.wrap(values);
        Set present = new HashSet();
        for (int i = 0; i < named.length; i++) {
            double value = buffer.getDouble();
            present.add(named[i]);
            Figure figure = (Figure) figures.get(named[i]);
            if (figure != null) {
                figure.value = value;
                continue;
            }
            figure = new Figure();
            figure.value = value;
            try {
                registry.register(named[i], figure);
                figures.put(named[i], figure);
            } catch (IllegalArgumentException taken) {
                continue;
            }
        }
        Iterator known = figures.keySet().iterator();
        while (known.hasNext()) {
            String name = (String) known.next();
            if (!present.contains(name)) {
                registry.remove(name);
                known.remove();
            }
        }
    }

    /** Removes every gauge. May be called twice. */
    public synchronized void close() {
        publish("", new byte[0]);
        closed = true;
    }
}
