//! Products of one pass, on the processor or on a device that holds the pass's weights.

use std::sync::{Arc, OnceLock};

use super::{DeviceError, Held, Product};
use crate::kernel::{self, Mat, Threads};

/// Weights held by a device while they are borrowed here, and the first failure.
#[derive(Debug)]
pub(crate) struct Session<'a> {
    weights: &'a [f32],
    held: Arc<dyn Held>,
    failure: OnceLock<DeviceError>,
}

impl<'a> Session<'a> {
    pub(crate) fn new(weights: &'a [f32], held: Arc<dyn Held>) -> Self {
        Self {
            weights,
            held,
            failure: OnceLock::new(),
        }
    }

    /// The first product that failed, if any: then no result of this session may be used.
    pub(crate) fn check(self) -> Result<(), DeviceError> {
        self.failure.into_inner().map_or(Ok(()), Err)
    }

    fn matmul(&self, c: &mut [f32], beta: f32, alpha: f32, a: Mat<'_>, b: Mat<'_>) {
        let product = Product {
            beta,
            alpha,
            a: a.operand(self.weights),
            b: b.operand(self.weights),
        };
        let c = &mut c[..a.rows() * b.columns()];
        if self.failure.get().is_none()
            && let Err(error) = self.held.product(c, &product)
        {
            // Another thread may have been first; one reason is enough.
            let _ = self.failure.set(error);
        }
        if self.failure.get().is_some() {
            // Nothing that is computed from it can look like a number.
            c.fill(f32::NAN);
        }
    }
}

/// Who makes a product.
#[derive(Debug, Clone, Copy)]
pub(crate) struct On<'a> {
    /// For what stays on the processor.
    pub(crate) threads: Threads,
    pub(crate) session: Option<&'a Session<'a>>,
}

impl On<'_> {
    /// `c = beta * c + alpha * a * b`; `c` has dense rows.
    pub(crate) fn matmul(self, c: &mut [f32], beta: f32, alpha: f32, a: Mat<'_>, b: Mat<'_>) {
        match self.session {
            Some(session) => session.matmul(c, beta, alpha, a, b),
            None => kernel::matmul(c, b.columns(), beta, alpha, a, b, self.threads),
        }
    }
}
