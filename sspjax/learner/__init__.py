"""From rewards to new parameters: advantages, packing, the objective, the optimizer, the update."""
