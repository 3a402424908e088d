//! A model of the shelf: every sandbox that was put in is accounted for, whatever happens.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

fn key(of: u8) -> Key {
    Key {
        image: "default".into(),
        harness: format!("h{of}"),
        digest: String::new(),
    }
}

fn settings(per_key: usize, total: usize) -> Settings {
    Settings {
        per_key,
        total,
        idle_s: 60,
    }
}

#[tokio::test(start_paused = true)]
async fn the_nearest_keys_are_filled_and_what_comes_no_more_is_surplus() {
    let now = Instant::now();
    let mut shelf = Shelf::new(settings(2, 3));
    shelf.expect([0, 0, 0, 1, 1, 2].map(key));
    let filled: Vec<_> = std::iter::from_fn(|| shelf.fill(now, 0)).collect();
    assert_eq!(filled, [key(0), key(0), key(1)], "2 of each, 3 in all");
    for (item, key) in filled.iter().enumerate() {
        shelf.filled(key, now, Some(item));
    }
    // The first job takes the oldest; another is filled while jobs of its key wait.
    shelf.promise(&key(0));
    assert!(shelf.surplus(now).is_empty());
    assert_eq!(shelf.take(&key(0), now), Some(0));
    shelf.release(&key(0));
    assert_eq!(shelf.fill(now, 0), Some(key(0)));
    shelf.filled(&key(0), now, Some(9));
    // Two are given out and take: none of that key waits, so it gives room to the next ones.
    shelf.promise(&key(0));
    shelf.promise(&key(0));
    assert!(shelf.surplus(now).is_empty(), "they are promised");
    assert_eq!(shelf.take(&key(0), now), Some(1));
    shelf.release(&key(0));
    shelf.release(&key(0));
    let gone: Vec<_> = shelf.surplus(now);
    assert_eq!(gone, [(key(0), 9, Dropped::Unwanted)], "it went without");
    assert_eq!(shelf.fill(now, 2), None, "two are not gone yet");
    assert_eq!(shelf.fill(now, 0), Some(key(1)));
    assert_eq!(shelf.fill(now, 0), Some(key(2)));
    assert_eq!(shelf.fill(now, 0), None);
}

#[tokio::test(start_paused = true)]
async fn age_rest_and_failures() {
    let start = Instant::now();
    let at = |s: u64| start + Duration::from_secs(s);
    let mut shelf = Shelf::new(settings(1, 4));
    shelf.expect([key(0)]);
    assert_eq!(shelf.fill(start, 0), Some(key(0)));
    shelf.filled(&key(0), start, Some('a'));
    assert_eq!(shelf.take(&key(0), at(60)), None, "too old");
    assert_eq!(shelf.surplus(at(60)), [(key(0), 'a', Dropped::Old)]);
    // A key that cannot be made is left alone for a while, then longer.
    assert_eq!(shelf.fill(at(60), 0), Some(key(0)));
    shelf.filled(&key(0), at(60), None);
    assert_eq!(
        (shelf.fill(at(64), 0), shelf.fill(at(65), 0)),
        (None, Some(key(0)))
    );
    shelf.filled(&key(0), at(65), None);
    assert_eq!(
        (shelf.fill(at(74), 0), shelf.fill(at(75), 0)),
        (None, Some(key(0)))
    );
    shelf.filled(&key(0), at(75), Some('b'));
    // Between two batches they are kept for the idle time.
    shelf.promise(&key(0));
    assert_eq!(shelf.take(&key(0), at(75)), Some('b'));
    shelf.release(&key(0));
    assert_eq!(shelf.fill(at(75), 0), None, "nobody waits");
    shelf.rest(at(75));
    assert_eq!(shelf.fill(at(75), 0), Some(key(0)));
    shelf.filled(&key(0), at(100), Some('c'));
    assert!(shelf.surplus(at(134)).is_empty());
    assert_eq!(shelf.surplus(at(135)), [(key(0), 'c', Dropped::Unwanted)]);
    assert_eq!(shelf.fill(at(136), 0), None);
    // Stopped: at once.
    shelf.rest(at(140));
    shelf.expect([]);
    assert_eq!(shelf.fill(at(140), 0), None);
    assert_eq!(shelf.drain(), []);
}

#[derive(Debug, Clone)]
enum Does {
    Expect(Vec<u8>),
    Rest,
    Promise(u8),
    Take(u8),
    Release(u8),
    Fill,
    Filled(usize, bool),
    Surplus,
    Wait(u64),
}

fn does() -> impl Strategy<Value = Does> {
    prop_oneof![
        1 => proptest::collection::vec(0_u8..4, 0..12).prop_map(Does::Expect),
        1 => Just(Does::Rest),
        4 => (0_u8..4).prop_map(Does::Promise),
        6 => (0_u8..4).prop_map(Does::Take),
        4 => (0_u8..4).prop_map(Does::Release),
        8 => Just(Does::Fill),
        8 => (0_usize..8, proptest::bool::weighted(0.8)).prop_map(|(at, ok)| Does::Filled(at, ok)),
        3 => Just(Does::Surplus),
        3 => (0_u64..90).prop_map(Does::Wait),
    ]
}

proptest! {
    #[test]
    fn none_is_used_twice_lost_too_old_or_beyond_the_bound(
        per_key in 0_usize..4, total in 0_usize..8,
        story in proptest::collection::vec(does(), 0..120),
    ) {
        // The clock is only ever added to.
        let mut now = Instant::now();
        let limits = settings(per_key, total);
        let mut shelf = Shelf::new(limits);
        let (mut next, mut filling, mut expected) = (0_u32, Vec::new(), BTreeSet::new());
        let mut born: BTreeMap<u32, (Key, Instant)> = BTreeMap::new();
        for step in story {
            match step {
                Does::Expect(keys) => {
                    expected = keys.iter().map(|of| key(*of)).collect();
                    shelf.expect(keys.into_iter().map(key));
                }
                Does::Rest => shelf.rest(now),
                Does::Promise(of) => shelf.promise(&key(of)),
                Does::Release(of) => shelf.release(&key(of)),
                Does::Take(of) => {
                    if let Some(item) = shelf.take(&key(of), now) {
                        let (own, since) = born.remove(&item).expect("given out once");
                        prop_assert_eq!(own, key(of), "of the key that was asked for");
                        prop_assert!(now - since < limits.idle(), "not too old");
                    }
                }
                Does::Fill => {
                    if let Some(own) = shelf.fill(now, 0) {
                        prop_assert!(expected.contains(&own), "nobody would use it");
                        filling.push(own);
                    }
                }
                Does::Filled(at, made) if !filling.is_empty() => {
                    let own = filling.remove(at % filling.len());
                    let item = made.then_some(next);
                    if made {
                        born.insert(next, (own.clone(), now));
                        next += 1;
                    }
                    shelf.filled(&own, now, item);
                }
                Does::Filled(..) => {}
                Does::Surplus => {
                    for (own, item, why) in shelf.surplus(now) {
                        let (of, since) = born.remove(&item).expect("dropped once");
                        prop_assert_eq!(own, of);
                        prop_assert_eq!(why == Dropped::Old, now - since >= limits.idle());
                    }
                }
                Does::Wait(seconds) => now += Duration::from_secs(seconds),
            }
            let (ready, making) = shelf
                .counts()
                .fold((0, 0), |(a, b), (_, ready, filling)| (a + ready, b + filling));
            prop_assert_eq!((ready, making), (born.len(), filling.len()), "none is lost");
            prop_assert!(ready + making <= total, "at most {} stand", total);
        }
        // Nobody comes any more: what stands goes at once, what is being made when it is made.
        shelf.expect([]);
        for of in 0..4 {
            (0..200).for_each(|_| shelf.release(&key(of)));
        }
        for own in filling {
            born.insert(next, (own.clone(), now));
            shelf.filled(&own, now, Some(next));
            next += 1;
        }
        prop_assert_eq!(shelf.fill(now, 0), None);
        for (_, item, _) in shelf.surplus(now) {
            prop_assert!(born.remove(&item).is_some());
        }
        prop_assert!(born.is_empty(), "left: {:?}", born);
    }
}
