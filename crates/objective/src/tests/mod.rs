//! Laws of the maths; the numbers themselves are checked by `tests/vectors.rs`.

mod gradients;
mod groups;
mod weights;
