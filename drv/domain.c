// SPDX-License-Identifier: GPL-2.0-only
/* What lies between the device and memory: an IOMMU, bounce buffers, peers. */
#include <linux/dma-map-ops.h>

#include "internal.h"

/* Whether the device reaches only what the DMA API has mapped for it. */
bool ugds_is_translated(struct pci_dev *pdev)
{
	struct iommu_domain *domain = iommu_get_domain_for_dev(&pdev->dev);

	return domain && (domain->type & __IOMMU_DOMAIN_PAGING);
}

static int count_device(struct device *dev, void *count)
{
	++*(int *)count;
	return 0;
}

/*
 * Whether the device can be given to someone who may do no harm by it: it
 * reaches only what is mapped for it, shares that with no other device, and can
 * raise no interrupt but its own (it could write any, to any address, were
 * interrupts not remapped).
 */
bool ugds_is_isolated(struct pci_dev *pdev)
{
	struct iommu_group *group;
	bool isolated;
	int count = 0;

	if (!ugds_is_translated(pdev))
		return false;
	group = iommu_group_get(&pdev->dev);
	if (!group)
		return false;
	iommu_group_for_each_dev(group, &count, count_device);
	isolated = count == 1 && ugds_isolated_msi(&pdev->dev, group);
	iommu_group_put(group);
	return isolated;
}

/*
 * The DMA API may leave translations in the IOMMU's cache for a while after it
 * has unmapped. A kernel driver's device has finished by then; ours is driven
 * by a user, and what was unmapped is freed next.
 */
void ugds_forget_translations(struct ugds_device *ud)
{
	struct iommu_domain *domain;

	if (!ud->translated)
		return;
	domain = iommu_get_domain_for_dev(&ud->pdev->dev);
	if (domain)
		iommu_flush_iotlb_all(domain);
}

/* Whether it would not be the memory itself that the device reads and writes. */
bool ugds_bounced(struct ugds_device *ud, dma_addr_t address)
{
	/* Through an IOMMU whole pages are never bounced. */
	return !ud->translated && dma_need_sync(&ud->pdev->dev, address);
}

/* A range of addresses that is a BAR of another device, or of none. */
struct window {
	struct pci_dev *peer;
	u64 begin;
	u64 end;
};

static bool inside(const struct window *window, u64 address)
{
	return address >= window->begin &&
	       address + UGDS_DRV_PAGE_SIZE <= window->end;
}

/* The page is not in this BAR: no further than to it does the gap reach. */
static void narrow(struct window *gap, const struct window *bar, u64 address)
{
	if (bar->end <= address)
		gap->begin = max(gap->begin, bar->end);
	else
		gap->end = min(gap->end, max(bar->begin, address));
}

/*
 * The BAR that holds the page, with a reference to its device; or the gap
 * between BARs, without one: host memory has many pages, and the machine many
 * devices. `translated`: it is an address of the CPU's; otherwise it is one of
 * the bus, which is the same on most machines.
 */
static struct window find_window(struct ugds_device *ud, u64 address,
				 bool translated)
{
	struct window gap = { NULL, 0, U64_MAX };
	struct pci_dev *other = NULL;
	int i;

	for_each_pci_dev(other) {
		if (other == ud->pdev)
			continue;
		for (i = 0; i < PCI_STD_NUM_BARS; i++) {
			struct resource *bar = &other->resource[i];
			u64 size = resource_size(bar);
			struct window cpu = { other, bar->start,
					      bar->start + size };
			struct window bus = { other, pci_bus_address(other, i),
					      pci_bus_address(other, i) + size };

			if (!(bar->flags & IORESOURCE_MEM) || !bar->start)
				continue;
			/* Either with the loop's reference. */
			if (inside(&cpu, address))
				return cpu;
			if (!translated && inside(&bus, address))
				return bus;
			narrow(&gap, &cpu, address);
			if (!translated)
				narrow(&gap, &bus, address);
		}
	}
	return gap;
}

/*
 * How many bytes of these pages are in a BAR of another PCI device: what can be
 * shown, without the exporter's word. `peer` is that of the first page, with a
 * reference, or NULL. `physical`: some address is not one that the IOMMU knows.
 */
u64 ugds_peer_bytes(struct ugds_device *ud, const u64 *pages, u64 count,
		    struct pci_dev **peer, bool *physical)
{
	struct iommu_domain *domain = NULL;
	struct window window = {};
	bool window_translated = false;
	u64 bytes = 0;
	u64 i;

	if (ud->translated)
		domain = iommu_get_domain_for_dev(&ud->pdev->dev);
	*peer = NULL;
	*physical = !domain;
	for (i = 0; i < count; i++) {
		/*
		 * The DMA API never gives out IOVAs that are addresses of PCI
		 * windows. So one without a translation is a bus address, which
		 * a switch forwards to the peer before any IOMMU sees it.
		 */
		u64 address = domain ? iommu_iova_to_phys(domain, pages[i]) : 0;
		bool translated = address;

		if (!translated) {
			address = pages[i];
			*physical = true;
		}
		if (!inside(&window, address) ||
		    window_translated != translated) {
			pci_dev_put(window.peer);
			window = find_window(ud, address, translated);
			window_translated = translated;
			cond_resched();
		}
		if (!window.peer)
			continue;
		if (!i)
			*peer = pci_dev_get(window.peer);
		bytes += UGDS_DRV_PAGE_SIZE;
	}
	pci_dev_put(window.peer);
	return bytes;
}
