//! Products on the first CUDA card by cuBLAS, in f32 without TF32.
//!
//! One stream and one lock, so products run one after the other and each thread waits for its own:
//! simple, and the same bits in every run. Driver and cuBLAS are opened at run time.

use std::{
    panic::catch_unwind,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use cudarc::{
    cublas::{self, CudaBlas, Gemm, GemmConfig},
    driver::{self, CudaContext, CudaSlice, CudaStream, CudaView},
};

use super::{Backend, Blas, DeviceError, Held, Operand, Product, Source};

const NAME: &str = "cuda";

/// The first card.
#[derive(Debug)]
pub(super) struct Cuda {
    stream: Arc<CudaStream>,
    blas: Mutex<CudaBlas>,
}

static CARD: OnceLock<Result<Cuda, DeviceError>> = OnceLock::new();

fn missing(reason: impl Into<String>) -> DeviceError {
    DeviceError::Missing {
        name: NAME.into(),
        reason: reason.into(),
    }
}

fn failed<E: std::fmt::Debug>(what: &'static str) -> impl Fn(E) -> DeviceError {
    move |error| DeviceError::Failed {
        name: NAME.into(),
        what,
        reason: format!("{error:?}"),
    }
}

impl Cuda {
    /// Opened once per process.
    pub(super) fn open() -> Result<&'static Self, DeviceError> {
        CARD.get_or_init(Self::start).as_ref().map_err(Clone::clone)
    }

    fn start() -> Result<Self, DeviceError> {
        #[expect(unsafe_code, reason = "opening a library runs its initialisers")]
        // SAFETY: these are NVIDIA's own libraries, found on the system's search path.
        let (driver, cublas) = unsafe {
            (
                driver::sys::is_culib_present(),
                cublas::sys::is_culib_present(),
            )
        };
        if !driver {
            return Err(missing("the driver's library (libcuda) was not found"));
        }
        if !cublas {
            return Err(missing("the library libcublas was not found"));
        }
        // The bindings panic when a library lacks a function that they want.
        let started = catch_unwind(|| {
            let context = CudaContext::new(0).map_err(|error| missing(format!("{error:?}")))?;
            let stream = context
                .new_stream()
                .map_err(|error| missing(format!("{error:?}")))?;
            let blas = CudaBlas::new(Arc::clone(&stream))
                .map_err(|error| missing(format!("cuBLAS: {error:?}")))?;
            Ok(Self {
                stream,
                blas: Mutex::new(blas),
            })
        });
        started.unwrap_or_else(|_| Err(missing("its library lacks a function of CUDA 12")))
    }
}

impl Backend for Cuda {
    fn hold(&self, weights: &[f32]) -> Result<Arc<dyn Held>, DeviceError> {
        // Only the one card is a `Cuda`.
        let card = Self::open()?;
        let weights = card
            .stream
            .clone_htod(weights)
            .map_err(failed("copying the weights to it"))?;
        Ok(Arc::new(OnCard { card, weights }))
    }
}

#[derive(Debug)]
struct OnCard {
    card: &'static Cuda,
    weights: CudaSlice<f32>,
}

impl OnCard {
    /// Copies an operand that is in memory to the card.
    fn bring(&self, operand: &Operand<'_>) -> Result<Option<CudaSlice<f32>>, DeviceError> {
        let Source::Memory(data) = operand.source else {
            return Ok(None);
        };
        let copied = self.card.stream.clone_htod(data);
        copied.map(Some).map_err(failed("copying an operand to it"))
    }

    /// The operand on the card.
    fn view<'v>(
        &'v self,
        operand: &Operand<'_>,
        brought: Option<&'v CudaSlice<f32>>,
    ) -> CudaView<'v, f32> {
        match (operand.source, brought) {
            (Source::Weights(from), _) => self.weights.slice(from..),
            (Source::Memory(_), Some(brought)) => brought.slice(..),
            // `bring` has copied every operand that is in memory.
            (Source::Memory(_), None) => self.weights.slice(..0),
        }
    }
}

impl Held for OnCard {
    fn product(&self, c: &mut [f32], product: &Product<'_>) -> Result<(), DeviceError> {
        let blas = self
            .card
            .blas
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let stream = &self.card.stream;
        let (a, b) = (self.bring(&product.a)?, self.bring(&product.b)?);
        let mut result = if product.beta == 0.0 {
            stream.alloc_zeros::<f32>(c.len())
        } else {
            stream.clone_htod(&*c)
        }
        .map_err(failed("making room for a result"))?;
        let Blas {
            transpose_left,
            transpose_right,
            m,
            n,
            k,
            left_stride,
            right_stride,
        } = Blas::of(product);
        let turn = |transpose| {
            if transpose {
                cublas::sys::cublasOperation_t::CUBLAS_OP_T
            } else {
                cublas::sys::cublasOperation_t::CUBLAS_OP_N
            }
        };
        let size = |size: usize| {
            i32::try_from(size).map_err(|_| failed("a product")("a side of 2^31 or more"))
        };
        let config = GemmConfig {
            transa: turn(transpose_left),
            transb: turn(transpose_right),
            m: size(m)?,
            n: size(n)?,
            k: size(k)?,
            alpha: product.alpha,
            lda: size(left_stride)?,
            ldb: size(right_stride)?,
            beta: product.beta,
            ldc: size(m)?,
        };
        let left = self.view(&product.b, b.as_ref());
        let right = self.view(&product.a, a.as_ref());
        #[expect(unsafe_code, reason = "cuBLAS takes addresses and sizes")]
        // SAFETY: `Mat` has checked that its last element lies inside its slice, of which these
        // are copies with the same strides; `result` has the length of `c`, m times n floats.
        unsafe { blas.gemm(config, &left, &right, &mut result) }.map_err(failed("a product"))?;
        stream
            .memcpy_dtoh(&result, c)
            .and_then(|()| stream.synchronize())
            .map_err(failed("copying a result from it"))
    }
}
