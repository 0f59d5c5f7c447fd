"""Load tests: workloads, clients, a synthetic engine, reports. Speaks HTTP and ipc only."""
