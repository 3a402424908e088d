//! Faults on demand.

use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use http::StatusCode;
use tokio::sync::broadcast;

use crate::error::ApiError;

/// Requests that a fault is for. Empty words mean all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Matcher {
    /// As in [`crate::Rule`], e.g. `create`.
    pub verb: String,
    /// As in [`crate::Rule`], e.g. `pods`, `pods/exec`.
    pub resource: String,
    /// Of one object.
    pub name: String,
}

/// What happens to a request instead of its answer, or before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ApiFault {
    /// 429 as from priority and fairness, with `Retry-After`.
    TooManyRequests {
        /// Seconds to wait.
        retry_after_s: u64,
    },
    /// 500.
    Internal,
    /// 503.
    Unavailable,
    /// 403 of a quota.
    Quota,
    /// 410.
    Gone,
    /// 409, as if somebody else had written meanwhile.
    Conflict,
    /// It is answered later.
    Slow(Duration),
    /// It is done, but the connection breaks instead of an answer.
    LostAnswer,
    /// The connection breaks and nothing is done.
    Refused,
}

/// What happens to all watches that are open now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WatchFault {
    /// A bookmark, for those who asked for bookmarks.
    Bookmark,
    /// An `ERROR` event with 410, then the end.
    Expire,
    /// An orderly end, as at the time limit.
    End,
    /// The connection breaks in the middle of the body.
    Cut,
}

#[derive(Debug)]
struct Rule {
    matcher: Matcher,
    fault: ApiFault,
    /// How many requests yet.
    times: u32,
}

#[derive(Debug)]
pub(crate) struct Faults {
    rules: Mutex<VecDeque<Rule>>,
    watches: broadcast::Sender<WatchFault>,
    streams: broadcast::Sender<()>,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            rules: Mutex::default(),
            watches: broadcast::channel(64).0,
            streams: broadcast::channel(64).0,
        }
    }
}

impl Matcher {
    /// Requests with this verb for this resource.
    #[must_use]
    pub fn of(verb: &str, resource: &str) -> Self {
        Self {
            verb: verb.to_owned(),
            resource: resource.to_owned(),
            name: String::new(),
        }
    }

    fn matches(&self, verb: &str, resource: &str, name: &str) -> bool {
        let fits = |wanted: &str, found: &str| wanted.is_empty() || wanted == found;
        fits(&self.verb, verb) && fits(&self.resource, resource) && fits(&self.name, name)
    }
}

impl Faults {
    fn rules(&self) -> MutexGuard<'_, VecDeque<Rule>> {
        self.rules.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn inject(&self, matcher: Matcher, fault: ApiFault, times: u32) {
        self.rules().push_back(Rule {
            matcher,
            fault,
            times,
        });
    }

    pub(crate) fn clear(&self) -> u32 {
        self.rules().drain(..).map(|rule| rule.times).sum()
    }

    /// The fault for a request, if one is due; the first rule that fits is used up by one.
    pub(crate) fn due(&self, verb: &str, resource: &str, name: &str) -> Option<ApiFault> {
        let mut rules = self.rules();
        let at = rules
            .iter()
            .position(|rule| rule.times > 0 && rule.matcher.matches(verb, resource, name))?;
        let rule = rules.get_mut(at)?;
        rule.times -= 1;
        let fault = rule.fault.clone();
        if rule.times == 0 {
            rules.remove(at);
        }
        Some(fault)
    }

    pub(crate) fn watches(&self) -> broadcast::Receiver<WatchFault> {
        self.watches.subscribe()
    }

    pub(crate) fn hit_watches(&self, fault: WatchFault) -> usize {
        self.watches.send(fault).unwrap_or(0)
    }

    pub(crate) fn streams(&self) -> broadcast::Receiver<()> {
        self.streams.subscribe()
    }

    pub(crate) fn cut_streams(&self) -> usize {
        self.streams.send(()).unwrap_or(0)
    }
}

impl ApiFault {
    /// The answer that it stands for, if it is one.
    pub(crate) fn error(&self, target: &crate::request::Target) -> Option<ApiError> {
        let resource = &target.resource;
        let name = target.name.as_deref().unwrap_or("x");
        Some(match self {
            Self::TooManyRequests { retry_after_s } => ApiError::too_many(*retry_after_s),
            Self::Internal => ApiError::internal("an injected fault"),
            Self::Unavailable => ApiError::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "ServiceUnavailable",
                "the server is currently unable to handle the request",
            ),
            Self::Quota => ApiError::forbidden(
                resource,
                name,
                "exceeded quota: injected, requested: pods=1, used: pods=1, limited: pods=1",
            ),
            Self::Gone => ApiError::too_old(1, 2),
            Self::Conflict => ApiError::modified(resource, name),
            Self::Slow(_) | Self::LostAnswer | Self::Refused => return None,
        })
    }
}
