"""tolaria: the hands. Trains one host or a fused population; tasks, data and the governor."""
