"""An attack, a defence and a metric that LeakGauge has never seen."""
