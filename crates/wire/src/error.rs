//! What can go wrong with a request, without a dialect. Each dialect has its own bodies.

/// Why a request body was refused. Always the client's doing: status 400, not retryable, the
/// harness sees the sentence, nothing was captured for training.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// A field that we read has another type or value than the API's.
    #[error("request field `{path}`: expected {expected}, found {found}")]
    Field {
        /// Where, e.g. `messages[3].content`.
        path: String,
        /// What the API says.
        expected: &'static str,
        /// What came, cut to 80 characters.
        found: String,
    },
    /// A feature that this server does not have.
    #[error("request field `{path}`: {feature} is not supported here; {advice}")]
    Unsupported {
        /// Where.
        path: String,
        /// What was asked for.
        feature: String,
        /// What to do instead.
        advice: &'static str,
    },
}

/// What went wrong, as far as a client may know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The body cannot be read. Final.
    InvalidRequest,
    /// No rollout has this key. Final.
    Unauthorized,
    /// No such path. Final.
    NotFound,
    /// The rollout has ended, or has used up what it may use: its key is good for nothing more.
    /// Final, and told in the way on which clients stop. They were measured or read: the SDKs of
    /// OpenAI and Anthropic repeat a 409, mini-swe-agent and Terminus-2 repeat a 400; on a 401
    /// nobody tries more than once again.
    Ended,
    /// The body exceeds the limit. Final.
    TooLarge,
    /// The prompt does not fit into the model's context. Harnesses compact and go on.
    TooLong,
    /// Too many calls. Retryable after the given seconds (Codex gives up without them).
    RateLimit {
        /// Value of the `retry-after` header, seconds.
        retry_after_s: u32,
    },
    /// The engine failed. Retryable.
    Engine,
    /// No capacity, or paused. Retryable.
    Overloaded,
}

impl ErrorKind {
    /// The HTTP status, the same in every dialect but for 529 of Messages.
    #[must_use]
    pub fn status(&self) -> u16 {
        match self {
            Self::InvalidRequest | Self::TooLong => 400,
            Self::Unauthorized | Self::Ended => 401,
            Self::NotFound => 404,
            Self::TooLarge => 413,
            Self::RateLimit { .. } => 429,
            Self::Engine => 500,
            Self::Overloaded => 503,
        }
    }

    /// Seconds for the `retry-after` header, when there is to be one.
    #[must_use]
    pub fn retry_after_s(&self) -> Option<u32> {
        match self {
            Self::RateLimit { retry_after_s } => Some(*retry_after_s),
            _ => None,
        }
    }

    /// Whether the same request may succeed later.
    #[must_use]
    pub fn retryable(&self) -> bool {
        matches!(
            self,
            Self::RateLimit { .. } | Self::Engine | Self::Overloaded
        )
    }
}
