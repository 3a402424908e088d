//! Every reference value that lies beside the workspace.

#[path = "../examples/vectors/check.rs"]
mod check;

use std::path::Path;

#[test]
fn reference_values_hold() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/vectors");
    if !folder.is_dir() {
        println!("skipped: no reference values at {}", folder.display());
        return;
    }
    let report = check::folder(&folder).unwrap();
    assert!(report.passed(), "{report}");
}

#[test]
fn wrong_values_and_unknown_functions_fail() {
    let folder = std::env::temp_dir().join(format!("objective-vectors-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let write = |text: &str| std::fs::write(folder.join("made_up.json"), text).unwrap();
    let inputs = r#""inputs": {"a": {"response_mask": [[1, 1]], "x": [[1.0, 2.0]]}}"#;
    let case = |function: &str, expect: &str| {
        format!(
            r#"{{{inputs}, "cases": [{{"fn": "{function}", "inputs": "a",
               "params": {{"matrix": "x"}}, "expect": {expect}}}]}}"#
        )
    };
    write(&case("masked_mean", "1.5"));
    assert!(check::folder(&folder).unwrap().passed());
    write(&case("masked_mean", "1.50003"));
    assert!(!check::folder(&folder).unwrap().passed());
    write(&case("masked_median", "1.5"));
    let report = check::folder(&folder).unwrap();
    assert!(!report.passed());
    assert!(
        report.to_string().contains("made_up.json masked_median"),
        "{report}"
    );
    write("{}");
    assert!(
        !check::folder(&folder).unwrap().passed(),
        "nothing was checked"
    );
    std::fs::remove_dir_all(folder).unwrap();
}
