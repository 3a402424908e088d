//! The state machine of one rollout and the pool that runs many.
