//! Nothing survives the death of the orchestrator.
