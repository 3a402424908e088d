//! The prefix tree of one rollout: build, classify, select, weigh, pack. Pure.
