//! The durable store of rollouts, calls and verdicts.
