//! Laws of the maths; the numbers themselves are checked by `tests/vectors.rs`.

mod agreement;
mod branches;
mod gradients;
mod groups;
mod weights;
