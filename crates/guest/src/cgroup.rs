//! Control groups: where they can be made, limits in both versions, removal, and the janitor.
//!
//! Each controller (memory, pids, cpu) is taken from version 1 or 2, wherever this machine has it
//! bound; a version 2 group is made besides for tracking wherever a cgroup2 is mounted, because
//! `cgroup.kill` works there without any controller. Groups lie below our own group, so that
//! limits on us hold for sandboxes too. In version 2, where a group with processes may not hand
//! controllers down, the nearest ancestor that may is used.

mod owner;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeSet,
    fs, io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use self::owner::is_garbage;
pub(crate) use self::owner::own_prefix;
use crate::protocol::{Capabilities, Degraded};

const PREFIX: &str = "espalier-";
/// How long the removal of one group may take before it is left to the janitor.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(2);

/// The two interfaces of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Version {
    V1,
    V2,
}

/// A folder in which groups with one controller can be made.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    version: Version,
    base: PathBuf,
}

/// Where groups can be made on this machine.
#[derive(Debug, Default)]
pub(crate) struct Places {
    memory: Option<Place>,
    pids: Option<Place>,
    cpu: Option<Place>,
    /// Version 2 folder for the group that tracks all processes.
    tracking: Option<PathBuf>,
    /// Why a controller is missing.
    refused: Vec<(&'static str, String)>,
}

/// The groups of one sandbox.
#[derive(Debug, Default)]
pub(crate) struct Group {
    /// Every folder, version 2 last.
    folders: Vec<(Version, PathBuf)>,
    memory: Option<(Version, PathBuf)>,
}

/// Limits to write.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GroupLimits {
    pub(crate) memory_bytes: u64,
    pub(crate) pids: u32,
    pub(crate) cpu_cores: f64,
}

/// One cgroup mount of `/proc/self/mountinfo`.
#[derive(Debug, PartialEq, Eq)]
struct CgroupMount {
    version: Version,
    controllers: Vec<String>,
    root: PathBuf,
    mount_point: PathBuf,
}

fn parse_mountinfo(text: &str) -> Vec<CgroupMount> {
    let parse_line = |line: &str| {
        let (left, right) = line.split_once(" - ")?;
        let mut left = left.split(' ').skip(3);
        let (root, mount_point) = (left.next()?, left.next()?);
        let mut right = right.split(' ');
        let version = match right.next()? {
            "cgroup" => Version::V1,
            "cgroup2" => Version::V2,
            _ => return None,
        };
        let options = right.nth(1)?;
        Some(CgroupMount {
            version,
            controllers: options.split(',').map(str::to_owned).collect(),
            root: root.into(),
            mount_point: mount_point.into(),
        })
    };
    text.lines().filter_map(parse_line).collect()
}

/// Our own group in a hierarchy, as a folder of the host.
fn own_folder(mount: &CgroupMount, self_cgroup: &str) -> Option<PathBuf> {
    let path = self_cgroup.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let ours = match mount.version {
            Version::V2 => controllers.is_empty(),
            Version::V1 => controllers
                .split(',')
                .any(|c| !c.is_empty() && mount.controllers.iter().any(|m| m == c)),
        };
        ours.then_some(Path::new(path))
    })?;
    let below = path.strip_prefix(&mount.root).unwrap_or(Path::new(""));
    Some(mount.mount_point.join(below))
}

fn write(path: &Path, value: &str) -> io::Result<()> {
    fs::write(path, value)
        .map_err(|e| io::Error::new(e.kind(), format!("{} <- {value}: {e}", path.display())))
}

/// Whether a group can be made in `base` (and, in version 2, gets `controller`).
fn try_base(base: &Path, version: Version, controller: Option<&str>) -> io::Result<()> {
    if let (Version::V2, Some(controller)) = (version, controller) {
        let has = |file: &str| {
            fs::read_to_string(base.join(file))
                .is_ok_and(|text| text.split_whitespace().any(|c| c == controller))
        };
        if !has("cgroup.controllers") {
            return Err(io::Error::other("the controller is not enabled here"));
        }
        if !has("cgroup.subtree_control") {
            write(
                &base.join("cgroup.subtree_control"),
                &format!("+{controller}"),
            )?;
        }
    }
    let probe = base.join(format!("{PREFIX}probe-{}", std::process::id()));
    fs::create_dir(&probe)
        .map_err(|e| io::Error::new(e.kind(), format!("mkdir in {}: {e}", base.display())))?;
    fs::remove_dir(&probe)
}

impl Places {
    /// Looks at this machine.
    pub(crate) fn find() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        Self::find_in(&read("/proc/self/mountinfo"), &read("/proc/self/cgroup"))
    }

    fn find_in(mountinfo: &str, self_cgroup: &str) -> Self {
        let mounts = parse_mountinfo(mountinfo);
        let mut places = Self::default();
        let unified = mounts.iter().find(|m| m.version == Version::V2);
        let unified_folders = |controller: Option<&str>| -> io::Result<PathBuf> {
            let missing = || io::Error::new(io::ErrorKind::NotFound, "no cgroup2 is mounted");
            let mount = unified.ok_or_else(missing)?;
            let own = own_folder(mount, self_cgroup).ok_or_else(missing)?;
            let mut first_error = None;
            for base in own
                .ancestors()
                .take_while(|a| a.starts_with(&mount.mount_point))
            {
                match try_base(base, Version::V2, controller) {
                    Ok(()) => return Ok(base.to_owned()),
                    Err(error) => first_error = first_error.or(Some(error)),
                }
            }
            Err(first_error.unwrap_or_else(missing))
        };
        for controller in ["memory", "pids", "cpu"] {
            let v1 = mounts.iter().find(|m| {
                m.version == Version::V1 && m.controllers.iter().any(|c| c == controller)
            });
            let place = match v1.and_then(|mount| own_folder(mount, self_cgroup)) {
                Some(base) => try_base(&base, Version::V1, None).map(|()| Place {
                    version: Version::V1,
                    base,
                }),
                None => unified_folders(Some(controller)).map(|base| Place {
                    version: Version::V2,
                    base,
                }),
            };
            match (place, controller) {
                (Ok(place), "memory") => places.memory = Some(place),
                (Ok(place), "pids") => places.pids = Some(place),
                (Ok(place), _) => places.cpu = Some(place),
                (Err(error), _) => places.refused.push((controller, error.to_string())),
            }
        }
        // One version 2 group serves its controllers and tracking.
        let shared = [&places.memory, &places.pids, &places.cpu]
            .into_iter()
            .flatten()
            .find(|place| place.version == Version::V2)
            .map(|place| place.base.clone());
        places.tracking = match shared.map_or_else(|| unified_folders(None), Ok) {
            Ok(base) => Some(base),
            Err(error) => {
                places.refused.push(("tracking", error.to_string()));
                None
            }
        };
        places
    }

    /// How limits are enforced, and what is missing.
    pub(crate) fn capabilities(&self, host_uid: u32) -> Capabilities {
        let say = |place: &Option<Place>, otherwise: &str| match place {
            Some(Place {
                version: Version::V1,
                ..
            }) => "cgroup v1".to_owned(),
            Some(Place {
                version: Version::V2,
                ..
            }) => "cgroup v2".to_owned(),
            None => otherwise.to_owned(),
        };
        let degraded = |(controller, found): &(&str, String)| {
            let (name, costs) = match *controller {
                "memory" => (
                    "memory-by-rlimit",
                    "the memory limit holds per process instead of per sandbox, and out_of_memory is never reported",
                ),
                "pids" => (
                    "pids-by-rlimit",
                    "the process limit counts per user namespace (RLIMIT_NPROC) instead of per sandbox",
                ),
                "cpu" => ("cpu-unlimited", "a sandbox may use every core"),
                _ => (
                    "no-tracking-group",
                    "a sandbox is killed through its PID 1 only, without cgroup.kill as a second way",
                ),
            };
            Degraded {
                name: name.to_owned(),
                found: found.clone(),
                costs: costs.to_owned(),
            }
        };
        Capabilities {
            memory: say(&self.memory, "rlimit"),
            pids: say(&self.pids, "rlimit"),
            cpu: say(&self.cpu, "none"),
            tracking: self.tracking.is_some(),
            host_uid,
            users: 1,
            degraded: self.refused.iter().map(degraded).collect(),
        }
    }

    /// Whether memory and processes need rlimits instead.
    pub(crate) fn needs_rlimits(&self) -> (bool, bool) {
        (self.memory.is_none(), self.pids.is_none())
    }

    fn bases(&self) -> BTreeSet<(bool, PathBuf)> {
        [&self.memory, &self.pids, &self.cpu]
            .into_iter()
            .flatten()
            .map(|place| (place.version == Version::V2, place.base.clone()))
            .chain(self.tracking.iter().map(|base| (true, base.clone())))
            .collect()
    }

    /// Makes the groups of one sandbox and writes its limits.
    pub(crate) fn make(&self, name: &str, limits: GroupLimits) -> io::Result<Group> {
        let mut group = Group::default();
        let made = self.make_into(&mut group, name, limits);
        if let Err(error) = made {
            group.remove();
            return Err(error);
        }
        Ok(group)
    }

    fn make_into(&self, group: &mut Group, name: &str, limits: GroupLimits) -> io::Result<()> {
        for (is_v2, base) in self.bases() {
            let folder = base.join(name);
            fs::create_dir(&folder).map_err(|e| {
                io::Error::new(e.kind(), format!("mkdir {}: {e}", folder.display()))
            })?;
            group
                .folders
                .push((if is_v2 { Version::V2 } else { Version::V1 }, folder));
        }
        if let Some(place) = &self.memory {
            let folder = place.base.join(name);
            let bytes = limits.memory_bytes.to_string();
            match place.version {
                Version::V1 => {
                    write(&folder.join("memory.limit_in_bytes"), &bytes)?;
                    // Absent without swap accounting.
                    let _ = write(&folder.join("memory.memsw.limit_in_bytes"), &bytes);
                    group.memory = Some((place.version, folder.join("memory.oom_control")));
                }
                Version::V2 => {
                    write(&folder.join("memory.max"), &bytes)?;
                    let _ = write(&folder.join("memory.swap.max"), "0");
                    group.memory = Some((place.version, folder.join("memory.events")));
                }
            }
        }
        if let Some(place) = &self.pids {
            write(
                &place.base.join(name).join("pids.max"),
                &limits.pids.to_string(),
            )?;
        }
        if let Some(place) = &self.cpu {
            let folder = place.base.join(name);
            let quota_us = ((limits.cpu_cores * 100_000.0) as u64).max(1_000);
            match place.version {
                Version::V1 => {
                    write(&folder.join("cpu.cfs_period_us"), "100000")?;
                    write(&folder.join("cpu.cfs_quota_us"), &quota_us.to_string())?;
                }
                Version::V2 => write(&folder.join("cpu.max"), &format!("{quota_us} 100000"))?,
            }
        }
        Ok(())
    }

    /// Removes the groups of wardens that are dead. Returns how many folders are gone.
    pub(crate) fn sweep(&self) -> usize {
        let mut removed = 0;
        for (is_v2, base) in self.bases() {
            let Ok(entries) = fs::read_dir(&base) else {
                continue;
            };
            for entry in entries.flatten() {
                let name = entry.file_name();
                if !name.to_str().is_some_and(is_garbage) {
                    continue;
                }
                let version = if is_v2 { Version::V2 } else { Version::V1 };
                let mut group = Group {
                    folders: vec![(version, entry.path())],
                    memory: None,
                };
                group.kill();
                removed += usize::from(group.remove());
            }
        }
        removed
    }
}

impl Group {
    /// The version 2 folder, for CLONE_INTO_CGROUP.
    pub(crate) fn open_v2(&self) -> Option<OwnedFd> {
        let (_, folder) = self
            .folders
            .iter()
            .find(|(version, _)| *version == Version::V2)?;
        let flags =
            rustix::fs::OFlags::PATH | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
        rustix::fs::open(folder, flags, rustix::fs::Mode::empty()).ok()
    }

    /// Puts a process in; `in_v2` when it was born in the version 2 group.
    pub(crate) fn add(&self, pid: i32, in_v2: bool) -> io::Result<()> {
        for (version, folder) in &self.folders {
            if *version == Version::V1 || !in_v2 {
                write(&folder.join("cgroup.procs"), &pid.to_string())?;
            }
        }
        Ok(())
    }

    /// The file that counts out-of-memory kills.
    pub(crate) fn memory_events(&self) -> Option<PathBuf> {
        self.memory.as_ref().map(|(_, path)| path.clone())
    }

    /// Kills every process inside that a group can name.
    pub(crate) fn kill(&self) {
        for (version, folder) in &self.folders {
            if *version == Version::V2 && fs::write(folder.join("cgroup.kill"), "1").is_ok() {
                continue;
            }
            let processes = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
            for pid in processes.lines().filter_map(|l| l.parse().ok()) {
                if let Some(pid) = rustix::process::Pid::from_raw(pid) {
                    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
                }
            }
        }
    }

    /// Removes the folders, waiting a bounded time for processes that are still ending. Returns
    /// whether all are gone.
    pub(crate) fn remove(&mut self) -> bool {
        let until = Instant::now() + REMOVE_TIMEOUT;
        self.folders.retain(|(_, folder)| {
            loop {
                match fs::remove_dir(folder) {
                    Ok(()) => return false,
                    Err(error) if error.kind() == io::ErrorKind::NotFound => return false,
                    Err(_) if Instant::now() < until => {
                        std::thread::sleep(Duration::from_millis(2));
                    }
                    Err(_) => return true,
                }
            }
        });
        self.folders.is_empty()
    }
}
