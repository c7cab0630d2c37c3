"""simic: the gym. Rollouts, advantages, PPO, rewards and the training loop."""
