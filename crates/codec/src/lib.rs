//! Chat template, tokenizer, reasoning and tool-call parsing, exact continuation. Pure.
