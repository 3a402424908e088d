//! The built-in chores.
