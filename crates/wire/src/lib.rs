//! Dialects of the model API and one Conversation between them. Pure.
