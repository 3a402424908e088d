//! Verifiers run in the sandbox; verdicts.
