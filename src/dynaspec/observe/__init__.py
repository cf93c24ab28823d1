"""What the engine tells about itself: counters, latencies, metrics and log lines. No torch, no clocks."""
