"""A training process's side: joins worlds, keeps copies of the state, and tells its peers what it has."""
