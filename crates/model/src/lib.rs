//! Decoder-only transformer on the CPU: files, batched decoding, forest forward and backward.
