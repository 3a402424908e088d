//! A provider without isolation: a temporary folder and the shell of this machine. Absolute
//! paths of the sandbox lie under that folder.

#![allow(dead_code, reason = "each test file uses a part")]

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Stdio,
    time::Instant,
};

use async_trait::async_trait;
use sandbox::{Exec, Exit, File, Output, Provider, Sandbox, SandboxError, Spec};

#[derive(Debug)]
pub(crate) struct FakeProvider;

#[derive(Debug)]
pub(crate) struct FakeSandbox {
    root: tempfile::TempDir,
    workspace: PathBuf,
}

impl FakeSandbox {
    pub(crate) fn new(spec: &Spec) -> Self {
        let root = tempfile::tempdir().unwrap();
        let sandbox = Self {
            root,
            workspace: spec.workspace.clone(),
        };
        for folder in [&spec.workspace, &spec.home] {
            fs::create_dir_all(sandbox.real(folder)).unwrap();
        }
        sandbox
    }

    pub(crate) fn real(&self, path: &Path) -> PathBuf {
        self.root.path().join(path.strip_prefix("/").unwrap())
    }

    fn failed(path: &Path, error: &std::io::Error) -> SandboxError {
        SandboxError::File {
            name: "fake".into(),
            path: path.display().to_string(),
            reason: error.to_string(),
        }
    }
}

#[async_trait]
impl Provider for FakeProvider {
    async fn create(&self, spec: Spec) -> Result<Box<dyn Sandbox>, SandboxError> {
        Ok(Box::new(FakeSandbox::new(&spec)))
    }
}

#[async_trait]
impl Sandbox for FakeSandbox {
    async fn exec(&self, exec: Exec) -> Result<Output, SandboxError> {
        let start = Instant::now();
        let workspace = self.workspace.to_string_lossy();
        let real = self.real(&self.workspace);
        // Whatever is removed is removed under the folder, and what is there is meant there: the
        // machine's own files are out of reach.
        let removes = exec
            .argv
            .iter()
            .any(|word| word == "rm" || word.contains("rm -rf"));
        let inside = |text: &str| {
            let text = text.replace(&*workspace, &real.to_string_lossy());
            let mapped =
                text.starts_with('/') && !text.starts_with(&*self.root.path().to_string_lossy());
            if mapped && (removes || self.real(Path::new(&text)).exists()) {
                return self.real(Path::new(&text)).to_string_lossy().into_owned();
            }
            text
        };
        let argv: Vec<String> = exec.argv.iter().map(|text| inside(text)).collect();
        let child = tokio::process::Command::new(&argv[0])
            .args(&argv[1..])
            .envs(exec.env.iter().map(|(name, value)| (name, inside(value))))
            .current_dir(self.real(&exec.cwd.unwrap_or_else(|| self.workspace.clone())))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| SandboxError::NotRunnable {
                name: "fake".into(),
                program: argv[0].clone(),
                reason: error.to_string(),
            })?;
        let mut output = Output {
            exit: Exit::TimedOut,
            stdout: Vec::new(),
            stderr: Vec::new(),
            dropped_bytes: 0,
            out_of_memory: false,
            seconds: 0.0,
        };
        if let Ok(done) = tokio::time::timeout(exec.timeout, child.wait_with_output()).await {
            let done = done.unwrap();
            output.exit = done.status.code().map_or(Exit::Signal(9), Exit::Code);
            output.stdout = done.stdout;
            output.stderr = done.stderr;
        }
        output.seconds = start.elapsed().as_secs_f64();
        Ok(output)
    }

    async fn upload(&self, files: Vec<File>) -> Result<(), SandboxError> {
        for file in files {
            let path = self.real(&file.path);
            let written = fs::create_dir_all(path.parent().unwrap())
                .and_then(|()| fs::write(&path, &file.content))
                .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(file.mode)));
            written.map_err(|error| Self::failed(&file.path, &error))?;
        }
        Ok(())
    }

    async fn download(&self, path: PathBuf, _: u64) -> Result<Vec<File>, SandboxError> {
        let mut files = Vec::new();
        let mut open = vec![path.clone()];
        while let Some(path) = open.pop() {
            let real = self.real(&path);
            let data = fs::metadata(&real).map_err(|error| Self::failed(&path, &error))?;
            if data.is_dir() {
                let entries = fs::read_dir(&real).map_err(|error| Self::failed(&path, &error))?;
                open.extend(entries.map(|entry| path.join(entry.unwrap().file_name())));
                continue;
            }
            let content = fs::read(&real).map_err(|error| Self::failed(&path, &error))?;
            let mode = data.permissions().mode() & 0o777;
            files.push(File {
                path,
                content,
                mode,
            });
        }
        files.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(files)
    }

    async fn destroy(self: Box<Self>) {}
}
