"""watch: runs in the browser, while they train. It reads telemetry, and can change nothing."""
