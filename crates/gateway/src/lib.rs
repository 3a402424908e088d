//! HTTP server between harness and engine: sessions, capture, settling.
