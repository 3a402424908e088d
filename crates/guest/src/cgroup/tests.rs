//! Both versions against a fake tree.

use super::{owner::pid_namespace, *};

const HYBRID: &str = "\
32 31 0:29 / /CG/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /CG/memory rw,relatime - cgroup cgroup rw,memory
40 31 0:37 / /CG/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /CG/unified rw,relatime - cgroup2 cgroup2 rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
";

/// A fake tree in a temporary folder, `/CG` replaced by it.
struct Fake(PathBuf);

impl Fake {
    fn new(name: &str, files: &[(&str, &str)]) -> Self {
        let root = std::env::temp_dir().join(format!("cgroup-test-{}-{name}", std::process::id()));
        for (path, content) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            if !content.is_empty() {
                fs::write(path, content).unwrap();
            }
        }
        Self(root)
    }

    fn text(&self, template: &str) -> String {
        template.replace("/CG", self.0.to_str().unwrap())
    }

    fn read(&self, path: &str) -> String {
        fs::read_to_string(self.0.join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const LIMITS: GroupLimits = GroupLimits {
    memory_bytes: 64 << 20,
    pids: 20,
    cpu_cores: 0.5,
};

#[test]
fn hybrid_machines_take_each_controller_where_it_is() {
    let fake = Fake::new(
        "hybrid",
        &[
            ("cpu/x", ""),
            ("memory/us/x", ""),
            ("unified/cgroup.controllers", "hugetlb"),
        ],
    );
    let places = Places::find_in(
        &fake.text(HYBRID),
        "4:memory:/us\n2:cpu,cpuacct:/\n8:pids:/\n0::/\n",
    );
    let place = |version, base: &str| {
        Some(Place {
            version,
            base: fake.0.join(base),
        })
    };
    assert_eq!(places.memory, place(Version::V1, "memory/us"));
    assert_eq!(places.cpu, place(Version::V1, "cpu"));
    assert_eq!(places.pids, None);
    assert_eq!(places.tracking, Some(fake.0.join("unified")));
    let capabilities = places.capabilities(7);
    assert_eq!(capabilities.degraded.len(), 1);
    assert_eq!(capabilities.degraded[0].name, "pids-by-rlimit");

    let mut group = places.make("espalier-1", LIMITS).unwrap();
    assert_eq!(
        fake.read("memory/us/espalier-1/memory.limit_in_bytes"),
        "67108864"
    );
    assert_eq!(fake.read("cpu/espalier-1/cpu.cfs_quota_us"), "50000");
    group.add(42, true).unwrap();
    assert_eq!(fake.read("memory/us/espalier-1/cgroup.procs"), "42");
    assert!(!fake.0.join("unified/espalier-1/cgroup.procs").exists());
    // A plain folder cannot be removed while files are in it; a real group can.
    for (_, folder) in &group.folders {
        for file in fs::read_dir(folder).unwrap() {
            fs::remove_file(file.unwrap().path()).unwrap();
        }
    }
    assert!(group.remove());
    assert!(!fake.0.join("memory/us/espalier-1").exists());
}

#[test]
fn unified_machines_use_one_group_in_the_nearest_folder_that_hands_controllers_down() {
    // Our own group has processes: writing its subtree_control is refused (here: the file
    // lacks the controller and is a folder).
    let fake = Fake::new(
        "unified",
        &[
            ("cgroup.controllers", "cpu memory pids"),
            ("cgroup.subtree_control", "cpu memory pids"),
            ("user/cgroup.controllers", "cpu memory pids"),
            ("user/cgroup.subtree_control", "cpu memory pids"),
            ("user/own/cgroup.controllers", "cpu memory pids"),
            ("user/own/cgroup.subtree_control/x", ""),
        ],
    );
    let mountinfo = fake.text("30 24 0:26 / /CG rw - cgroup2 cgroup2 rw,nsdelegate\n");
    let places = Places::find_in(&mountinfo, "0::/user/own\n");
    let expected = Some(Place {
        version: Version::V2,
        base: fake.0.join("user"),
    });
    assert_eq!((&places.memory, &places.pids), (&expected, &expected));
    assert_eq!(places.tracking, Some(fake.0.join("user")));
    assert_eq!(places.bases().len(), 1);
    let group = places.make("espalier-2", LIMITS).unwrap();
    assert_eq!(fake.read("user/espalier-2/memory.max"), "67108864");
    assert_eq!(fake.read("user/espalier-2/pids.max"), "20");
    assert_eq!(fake.read("user/espalier-2/cpu.max"), "50000 100000");
    assert_eq!(
        group.memory_events(),
        Some(fake.0.join("user/espalier-2/memory.events"))
    );
    assert!(places.capabilities(0).degraded.is_empty());
}

#[test]
fn nothing_mounted_is_four_named_degraded_modes() {
    let places = Places::find_in("", "0::/\n");
    let names: Vec<_> = places
        .capabilities(0)
        .degraded
        .into_iter()
        .map(|d| d.name)
        .collect();
    assert_eq!(
        names,
        [
            "memory-by-rlimit",
            "pids-by-rlimit",
            "cpu-unlimited",
            "no-tracking-group"
        ]
    );
    assert_eq!(places.needs_rlimits(), (true, true));
}

#[test]
fn containers_mount_a_subtree_as_root() {
    let mounts = parse_mountinfo("35 31 0:32 /docker/abc /CG/memory ro - cgroup c rw,memory\n");
    let own = own_folder(&mounts[0], "4:memory:/docker/abc/x\n");
    assert_eq!(own, Some("/CG/memory/x".into()));
}

#[test]
fn only_groups_of_dead_owners_of_our_namespace_are_garbage() {
    let namespace = pid_namespace();
    let own = format!("{}-3", own_prefix());
    assert!(!is_garbage(&own), "{own}");
    let pid = std::process::id();
    assert!(is_garbage(&format!("espalier-{namespace}-{pid}-1-3")));
    assert!(!is_garbage(&format!(
        "espalier-{}-{pid}-1-3",
        namespace + 1
    )));
    for name in [
        "espalier-",
        "espalier-x",
        "espalier-probe-1",
        "docker",
        "espalier-1-2-3",
    ] {
        assert!(!is_garbage(name), "{name}");
    }
}
