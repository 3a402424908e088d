//! Advantages, rollout correction, policy losses, aggregation: plain reference maths. Pure.
