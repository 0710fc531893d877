"""Names of the files of a run."""

CONFIG, METRICS, STATE, REPORT = "config.yaml", "metrics.json", "trainer_state.json", "report.html"
