source (status dirname)/dsl.fish
