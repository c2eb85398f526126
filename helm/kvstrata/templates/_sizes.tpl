{{/* Sizes in bytes, and the memory that pods need: from the sizes of their pools. */}}

{{/* Bytes of a quantity: 512Ki, 64Mi, 8Gi, 2Ti. */}}
{{- define "kvstrata.bytes" -}}
{{- $text := toString . -}}
{{- $units := dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- mul (regexFind "^[0-9]+" $text | int64) (get $units (regexFind "[KMGT]i$" $text) | int64) -}}
{{- end -}}

{{/* A quantity in Mi that is not less than so many bytes. */}}
{{- define "kvstrata.mebibytes" -}}
{{- printf "%dMi" (div (add (int64 .) 1048575) 1048576) -}}
{{- end -}}

{{/* Bytes of SSD that one node is given. */}}
{{- define "kvstrata.ssdBytes" -}}
{{- $sum := int64 0 -}}
{{- range .Values.storage.ssd.devices -}}
{{- $sum = add $sum (int64 (include "kvstrata.bytes" .size)) -}}
{{- end -}}
{{- $sum -}}
{{- end -}}

{{/* Bytes of a node beside its pool: process, 1 KiB a block of both tiers, page tables (1/128 of DRAM), /dev/shm,
     and 512 MiB for NIXL and UCX with RDMA. */}}
{{- define "kvstrata.nodeOverheadBytes" -}}
{{- $dram := int64 (include "kvstrata.bytes" .Values.storage.dram) -}}
{{- $blocks := div (add $dram (int64 (include "kvstrata.ssdBytes" .))) (int64 (include "kvstrata.bytes" .Values.storage.blockBytes)) -}}
{{- $base := int64 (include "kvstrata.bytes" .Values.storage.memoryBase) -}}
{{- $shm := int64 (include "kvstrata.bytes" .Values.storage.shm) -}}
{{- $rdma := .Values.storage.rdma.enabled | ternary 536870912 0 -}}
{{- add $base $shm $rdma (mul $blocks 1024) (div $dram 128) -}}
{{- end -}}

{{/* The memory limit of a node. Huge pages are a resource of their own, and not part of it. */}}
{{- define "kvstrata.nodeMemory" -}}
{{- $bytes := int64 (include "kvstrata.nodeOverheadBytes" .) -}}
{{- if not .Values.storage.hugepages -}}
{{- $bytes = add $bytes (int64 (include "kvstrata.bytes" .Values.storage.dram)) -}}
{{- end -}}
{{- include "kvstrata.mebibytes" $bytes -}}
{{- end -}}

{{/* Huge pages of 2 MiB for the pool. */}}
{{- define "kvstrata.nodeHugepages" -}}
{{- $dram := int64 (include "kvstrata.bytes" .Values.storage.dram) -}}
{{- printf "%dMi" (mul 2 (div (add $dram 2097151) 2097152)) -}}
{{- end -}}

{{/* The memory limit of a master: 256 bytes a block, twice what its directory takes, and 512 MiB. */}}
{{- define "kvstrata.masterMemory" -}}
{{- include "kvstrata.mebibytes" (add 536870912 (mul (int64 .Values.master.blocks) 256)) -}}
{{- end -}}

{{/* Times that a node may be asked, each 5 s, before it has to serve: a minute, and a second for 256 MiB of DRAM. */}}
{{- define "kvstrata.nodeStartupProbes" -}}
{{- add 12 (div (int64 (include "kvstrata.bytes" .Values.storage.dram)) 1342177280) (div (int64 (include "kvstrata.ssdBytes" .)) 34359738368) -}}
{{- end -}}
