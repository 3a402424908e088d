//! From trees to new weights: batches, GRPO, SFT, checkpoints.
