"""The product's promise on one machine: a cluster on loopback, real DCP checkpoints, a lost node."""
