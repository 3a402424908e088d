//! What the API does with objects: reading, watching, writing.

pub(crate) mod read;
pub(crate) mod watch;
pub(crate) mod write;
