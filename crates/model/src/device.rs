//! Where the products with weights are made: on this processor, or on a device behind the trait
//! [`Backend`]. Attention, norms and the optimiser stay on the processor.
//!
//! A device gets the weights once ([`Backend::hold`]), then products one by one: an operand is a
//! part of the held weights or comes along from memory, and every result goes back to memory. A
//! product that fails is an error of the pass or of the decoding step; nothing is computed on the
//! processor instead.
//!
//! `cuda` is the one kind so far, behind the feature of the same name (`cuda.rs`).

#[cfg(feature = "cuda")]
mod cuda;
mod session;

use std::sync::Arc;

pub(crate) use session::{On, Session};

/// Why a device cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// No such kind.
    #[error("device: expected cpu or cuda, found {found:?}")]
    Unknown {
        /// What was asked for.
        found: String,
    },
    /// This program was built without it.
    #[error(
        "device {name}: this program was built without it; build it with `cargo build --release -p espalier --features {name}`, or use the device cpu"
    )]
    NotBuilt {
        /// What was asked for.
        name: String,
    },
    /// It is not on this machine, or does not start.
    #[error(
        "device {name}: {reason}; install the driver and cuBLAS, or use the device cpu (nothing falls back to it by itself)"
    )]
    Missing {
        /// What was asked for.
        name: String,
        /// What was found.
        reason: String,
    },
    /// It failed while it worked.
    #[error("device {name}: {what} failed: {reason}; what was computed with it is not used")]
    Failed {
        /// Which device.
        name: String,
        /// What it did.
        what: &'static str,
        /// What it said.
        reason: String,
    },
}

/// Where an operand lies.
#[derive(Debug, Clone, Copy)]
pub enum Source<'a> {
    /// From this float of the held weights on.
    Weights(usize),
    /// In memory.
    Memory(&'a [f32]),
}

/// A matrix: element (r, c) is `r * row_stride + c * column_stride` floats into its source. One
/// of the strides is 1.
#[derive(Debug, Clone, Copy)]
pub struct Operand<'a> {
    /// Where it lies.
    pub source: Source<'a>,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub columns: usize,
    /// Floats from a row to the next.
    pub row_stride: usize,
    /// Floats from a column to the next.
    pub column_stride: usize,
}

/// `c = beta · c + alpha · a · b`; `c` has dense rows. `beta` 0 does not read `c`.
#[derive(Debug, Clone, Copy)]
pub struct Product<'a> {
    /// Of the old result.
    pub beta: f32,
    /// Of the product.
    pub alpha: f32,
    /// Left.
    pub a: Operand<'a>,
    /// Right; as many rows as `a` has columns.
    pub b: Operand<'a>,
}

/// A kind of device.
pub trait Backend: std::fmt::Debug + Send + Sync {
    /// Copies weights to it.
    ///
    /// # Errors
    /// [`DeviceError::Failed`].
    fn hold(&self, weights: &[f32]) -> Result<Arc<dyn Held>, DeviceError>;
}

/// Weights on a device. They stay there as long as this lives.
pub trait Held: std::fmt::Debug + Send + Sync {
    /// One product; back when `c` has the result.
    ///
    /// # Errors
    /// [`DeviceError::Failed`]; `c` may hold anything.
    fn product(&self, c: &mut [f32], product: &Product<'_>) -> Result<(), DeviceError>;
}

/// A device, by its backend; the processor without one.
#[derive(Debug, Clone, Copy, Default)]
pub struct Device(Option<&'static dyn Backend>);

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        match (self.0, other.0) {
            (None, None) => true,
            (Some(own), Some(other)) => std::ptr::addr_eq(own, other),
            _ => false,
        }
    }
}

impl Eq for Device {}

impl Device {
    /// This processor.
    pub const CPU: Self = Self(None);

    /// The device of a recipe's name: `cpu` or `cuda` (the first card).
    ///
    /// # Errors
    /// [`DeviceError`] when there is none of that name here.
    pub fn open(name: &str) -> Result<Self, DeviceError> {
        match name {
            "cpu" => Ok(Self::CPU),
            #[cfg(feature = "cuda")]
            "cuda" => cuda::Cuda::open().map(|cuda| Self(Some(cuda))),
            #[cfg(not(feature = "cuda"))]
            "cuda" => Err(DeviceError::NotBuilt { name: name.into() }),
            other => Err(DeviceError::Unknown {
                found: other.into(),
            }),
        }
    }

    /// A device of another kind.
    #[must_use]
    pub const fn of(backend: &'static dyn Backend) -> Self {
        Self(Some(backend))
    }

    /// Copies weights to the device; `None` on the processor, which reads them where they are.
    pub(crate) fn hold(self, weights: &[f32]) -> Result<Option<Arc<dyn Held>>, DeviceError> {
        self.0.map(|backend| backend.hold(weights)).transpose()
    }
}

/// A product in the terms of BLAS, which counts columns first: what it calls the left operand is
/// our right one, and our rows are its columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg(any(test, feature = "cuda"))]
pub(crate) struct Blas {
    /// Whether BLAS transposes its left operand (our `b`).
    pub(crate) transpose_left: bool,
    /// Whether BLAS transposes its right operand (our `a`).
    pub(crate) transpose_right: bool,
    /// Our columns.
    pub(crate) m: usize,
    /// Our rows.
    pub(crate) n: usize,
    /// The inner size.
    pub(crate) k: usize,
    /// Floats between BLAS's columns of its left operand.
    pub(crate) left_stride: usize,
    /// The same of its right operand.
    pub(crate) right_stride: usize,
}

#[cfg(any(test, feature = "cuda"))]
impl Blas {
    pub(crate) fn of(product: &Product<'_>) -> Self {
        let (a, b) = (&product.a, &product.b);
        // Rows that lie side by side are BLAS's columns of the transpose, which is what it wants.
        let flat = |operand: &Operand<'_>| operand.column_stride == 1;
        let stride = |operand: &Operand<'_>| {
            if flat(operand) {
                operand.row_stride.max(operand.columns).max(1)
            } else {
                operand.column_stride.max(operand.rows).max(1)
            }
        };
        Self {
            transpose_left: !flat(b),
            transpose_right: !flat(a),
            m: b.columns,
            n: a.rows,
            k: a.columns,
            left_stride: stride(b),
            right_stride: stride(a),
        }
    }
}

#[cfg(test)]
mod tests;
