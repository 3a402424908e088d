//! Statistics of evaluations: pass@1, intervals.
