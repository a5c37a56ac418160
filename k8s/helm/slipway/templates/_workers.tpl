{{/* Each worker as it will be: files/workers.yaml, the size of models, worker of the values, and then its own values; pools likewise. */}}

{{- define "slipway.table" -}}
{{- .Files.Get "files/workers.yaml" -}}
{{- end -}}

{{- define "slipway.sizes" -}}
{{- .Files.Get "files/sizes.yaml" -}}
{{- end -}}

{{/* Change a mapping by another one, at every depth: dict with base and over. Unlike mergeOverwrite it takes 0, false and "". */}}
{{- define "slipway.override" -}}
{{- range $key, $value := .over -}}
{{- if and (kindIs "map" $value) (kindIs "map" (get $.base $key)) -}}
{{- include "slipway.override" (dict "base" (get $.base $key) "over" $value) -}}
{{- else -}}
{{- $_ := set $.base $key $value -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* All workers, by name, as YAML. */}}
{{- define "slipway.workers" -}}
{{- include "slipway.check" . -}}
{{- $root := . -}}
{{- $table := include "slipway.table" . | fromYaml -}}
{{- $workers := dict -}}
{{- range $name, $row := $table -}}
{{- $own := get $root.Values.workers $name | default dict -}}
{{- $_ := set $workers $name (include "slipway.worker" (dict "root" $root "service" $name "row" $row "own" $own) | fromYaml) -}}
{{- end -}}
{{- range $name, $pool := .Values.pools -}}
{{- $row := get $table $pool.worker -}}
{{- $own := omit $pool "worker" -}}
{{- $_ := set $workers $name (include "slipway.worker" (dict "root" $root "service" $pool.worker "row" $row "own" $own) | fromYaml) -}}
{{- end -}}
{{- toYaml $workers -}}
{{- end -}}

{{/* One worker: dict with root, service, row and own. */}}
{{- define "slipway.worker" -}}
{{- $row := .row -}}
{{- $memory := dict "reserved" $row.reserved "memory" $row.memory -}}
{{- $volume := dict "size" $row.volume -}}
{{- with .root.Values.size -}}
{{- with get (get (include "slipway.sizes" $.root | fromYaml) .) $.service -}}
{{- $memory = dict "reserved" .memory "memory" .memory -}}
{{- $volume = dict "size" .volume -}}
{{- end -}}
{{- end -}}
{{- $requests := dict "cpu" $row.cpu "memory" $memory.reserved "ephemeral-storage" "1Gi" -}}
{{- $limits := dict "cpu" "8" "memory" $memory.memory "ephemeral-storage" "2Gi" -}}
{{- $worker := dict "replicas" $row.replicas "resources" (dict "requests" $requests "limits" $limits) "volume" $volume -}}
{{- include "slipway.override" (dict "base" $worker "over" (deepCopy (omit .root.Values.worker "settings" "env"))) -}}
{{- include "slipway.override" (dict "base" $worker "over" (deepCopy (omit .own "env"))) -}}
{{- $own := .own.env | default list -}}
{{- $names := list -}}
{{- range $own }}{{ $names = append $names .name }}{{ end -}}
{{- $others := list -}}
{{- range .root.Values.worker.env }}{{ if not (has .name $names) }}{{ $others = append $others . }}{{ end }}{{ end -}}
{{- $_ := set $worker "env" (concat $others $own) -}}
{{- $_ := set $worker "service" .service -}}
{{- $_ := set $worker "imports" (and (eq .service "merge") (gt (len .root.Values.import.from) 0)) -}}
{{- $stages := splitList "," $row.stages -}}
{{- if $worker.imports }}{{ $stages = append $stages "import" | sortAlpha }}{{ end -}}
{{- $_ := set $worker "stages" (join "," $stages) -}}
{{- $_ := set $worker "cache" (ternary $row.cache (include "slipway.half" $worker.volume.size) (eq $worker.volume.size $row.volume)) -}}
{{- if $worker.gpu -}}
{{- include "slipway.gpu" $worker -}}
{{- end -}}
{{- toYaml $worker -}}
{{- end -}}

{{/* Put a worker onto a GPU: its resource, the nodes that have one, and the taint that these have. */}}
{{- define "slipway.gpu" -}}
{{- $gpu := .gpu -}}
{{- range list .resources.requests .resources.limits }}{{ $_ := set . $gpu.resource ($gpu.count | int | toString) }}{{ end -}}
{{- $digits := trimPrefix "sm" $gpu.architecture -}}
{{- $last := sub (len $digits) 1 | int -}}
{{- $labels := dict "nvidia.com/gpu.compute.major" (substr 0 $last $digits) "nvidia.com/gpu.compute.minor" (substr $last (len $digits) $digits) -}}
{{- $selector := .nodeSelector | default dict | deepCopy -}}
{{- include "slipway.override" (dict "base" $selector "over" ($gpu.nodeSelector | default $labels)) -}}
{{- $_ := set . "nodeSelector" $selector -}}
{{- $taint := dict "key" "nvidia.com/gpu" "operator" "Exists" "effect" "NoSchedule" -}}
{{- $_ := set . "tolerations" (concat (.tolerations | default list) ($gpu.tolerations | default (list $taint))) -}}
{{- with $gpu.runtimeClassName }}{{ $_ := set $ "runtimeClassName" . }}{{ end -}}
{{- end -}}

{{/* Half of a volume, as the programs write sizes: the other half is for the running task. */}}
{{- define "slipway.half" -}}
{{- $mebibytes := div (include "slipway.mebibytes" . | int64) 2 -}}
{{- if mod $mebibytes 1024 }}{{ $mebibytes }}MiB{{ else }}{{ div $mebibytes 1024 }}GiB{{ end -}}
{{- end -}}

{{/* A quantity of Kubernetes in MiB; 0 for one that is written in another way than with Mi, Gi or Ti. */}}
{{- define "slipway.mebibytes" -}}
{{- $text := toString . -}}
{{- if not (regexMatch "^[0-9]+[MGT]i$" $text) -}}0
{{- else -}}
{{- $scale := get (dict "Mi" 1 "Gi" 1024 "Ti" 1048576) (regexFind "[MGT]i" $text) -}}
{{- mul (regexFind "^[0-9]+" $text | int64) $scale -}}
{{- end -}}
{{- end -}}

{{/* Time that a pod has to end, in seconds: more than --drain-seconds. */}}
{{- define "slipway.grace" -}}
{{- if .spot }}25{{ else }}{{ add (int64 .drainSeconds) 120 }}{{ end -}}
{{- end -}}
