"""Speed and memory, always as ratios to softmax attention measured in the same run."""
