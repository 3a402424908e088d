//! What a rollout asked of the internet, for a terminal.

use std::collections::BTreeMap;

use sandbox::EgressRecord;

use crate::text::{short, table};

/// By host: what was let through, and what was not, with the reason of the last time.
pub(super) fn text(records: Option<&[EgressRecord]>) -> String {
    let Some(records) = records else {
        return String::new();
    };
    if records.is_empty() {
        return "egress: it had a way out and asked for nothing\n".to_owned();
    }
    let mut hosts: BTreeMap<(String, String), (u64, u64, u64, &str)> = BTreeMap::new();
    for record in records {
        let host = format!("{}:{}", short(&record.host, 60), record.port);
        let decision = format!("{:?}", record.decision).to_lowercase();
        let seen = hosts.entry((host, decision)).or_default();
        seen.0 += 1;
        seen.1 += record.up_bytes;
        seen.2 += record.down_bytes;
        seen.3 = record.reason.as_deref().unwrap_or_default();
    }
    let rows = hosts.into_iter().map(|((host, decision), seen)| {
        let (times, up, down, why) = seen;
        let numbers = [times, up, down].map(|number| number.to_string());
        let [times, up, down] = numbers;
        vec![host, decision, times, up, down, short(why, 60)]
    });
    let header = ["egress", "", "times", "bytes up", "bytes down", "why"];
    table(&header, &rows.collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use sandbox::Decision;

    use super::*;

    fn record(host: &str, decision: Decision, reason: Option<&str>) -> EgressRecord {
        EgressRecord {
            time_s: 0.0,
            method: "CONNECT".into(),
            host: host.into(),
            port: 443,
            decision,
            reason: reason.map(str::to_owned),
            up_bytes: 10,
            down_bytes: 200,
            seconds: 0.1,
        }
    }

    #[test]
    fn hosts_are_counted_by_what_became_of_them() {
        let records = [
            record("pypi.org", Decision::Allowed, None),
            record("evil.org", Decision::Denied, Some("not on the list")),
            record("pypi.org", Decision::Allowed, None),
        ];
        insta::assert_snapshot!(text(Some(&records)), @r"
        egress                 times  bytes up  bytes down  why
        evil.org:443  denied       1        10         200  not on the list
        pypi.org:443  allowed      2        20         400
        ");
        assert_eq!(text(None), "");
        assert!(text(Some(&[])).contains("asked for nothing"));
    }
}
