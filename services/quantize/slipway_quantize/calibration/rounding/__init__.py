"""Round the weights of one layer after the other: grids, the passing on of errors, the choice by held-out inputs."""
