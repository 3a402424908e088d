//! What every kind promises.

use std::sync::Arc;

use crate::{
    suite::{World, run_all},
    support::provider,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_suite_of_all_kinds() {
    let provider = provider().await;
    let memory_counted = provider.capabilities().memory.starts_with("cgroup");
    let world = World {
        memory_counted,
        ..World::new(Arc::new(provider))
    };
    run_all(&world, 6).await;
}
