//! A call becomes a row: against which earlier call, and what of it is new.

use std::sync::Arc;

use record::CallId;

use crate::LedgerError;
use crate::recent::{CHAIN_MAX, Recent};
use crate::row::{CallRow, Place, encode_call};
use crate::source::{Difference, Source};

/// A body larger than this that shares no beginning with another is tried against the latest.
const UNLIKE_BYTES_MIN: usize = 4 << 10;

/// Makes the row of a call against the best of `candidates`, calls of the same rollout that are in
/// the database: the one it is said to carry on, else the one whose tokens it shares most. Without
/// any it is stored whole.
pub(crate) fn encode(
    candidates: &[Arc<Recent>],
    said: Option<u32>,
    place: &Place<'_>,
    source: Source,
) -> Result<(CallRow, Recent), LedgerError> {
    let fits: Vec<&Arc<Recent>> = candidates
        .iter()
        .filter(|recent| recent.chain < CHAIN_MAX)
        .collect();
    let row = |difference: &Difference, parent: Option<&Arc<Recent>>| {
        let against = parent.map(|parent| (parent.number, &parent.source));
        encode_call(place, &source, difference, against)
    };
    let (mut row_found, mut difference, mut parent) = match best(&fits, said, place.id, &source)? {
        Some((parent, difference)) => (row(&difference, Some(parent))?, difference, Some(parent)),
        None => {
            let difference = source.difference(place.id, None)?;
            (row(&difference, None)?, difference, None)
        }
    };
    // A client that changes something early in every request shares no beginning with any call,
    // yet most of what follows.
    if parent.is_none()
        && row_found.body.len() > UNLIKE_BYTES_MIN
        && let Some(latest) = candidates.last().filter(|recent| recent.chain < CHAIN_MAX)
    {
        let other = source.difference(place.id, Some(&latest.source))?;
        let against = row(&other, Some(latest))?;
        if against.body.len() < row_found.body.len() / 2 {
            (row_found, difference, parent) = (against, other, Some(latest));
        }
    }
    let extends = parent
        .filter(|parent| difference.appends(&parent.source))
        .map(|parent| parent.number);
    let recent = Recent {
        number: place.number,
        call: place.id.index,
        chain: parent.map_or(0, |parent| parent.chain + 1),
        extends,
        source: source.compared(difference),
    };
    Ok((row_found, recent))
}

fn best<'a>(
    fits: &[&'a Arc<Recent>],
    said: Option<u32>,
    id: &CallId,
    source: &Source,
) -> Result<Option<(&'a Arc<Recent>, Difference)>, LedgerError> {
    let named = said.and_then(|call| fits.iter().rfind(|recent| recent.call == call));
    if let Some(named) = named {
        let difference = source.difference(id, Some(&named.source))?;
        if difference.worth_it(source) {
            return Ok(Some((*named, difference)));
        }
    }
    let Some(most) = fits
        .iter()
        .filter(|recent| named.is_none_or(|named| named.number != recent.number))
        .max_by_key(|recent| (source.tokens_shared(&recent.source), recent.number))
    else {
        return Ok(None);
    };
    let difference = source.difference(id, Some(&most.source))?;
    Ok(difference.worth_it(source).then_some((*most, difference)))
}
